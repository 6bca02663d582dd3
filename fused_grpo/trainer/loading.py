"""Models, tokenizers and checkpoints hold numbers and texts; none of them brings code along.

What transformers, peft and torch would do beyond that, on the word of a file, is refused here: code
of a model's repository, kernels that its configuration names, modules that an adapter names,
pickles with anything else in them than tensors.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

# the key of an adapter's configuration with which peft imports the module named "megatron_core"
IMPORTS = "megatron_config"
# of a model's configuration: a name with a slash is a repository of kernels, which are programs
KERNELS = ("attn_implementation", "_attn_implementation", "experts_implementation")
_WHERE = ("cache_dir", "local_files_only", "revision", "subfolder", "token")  # of from_pretrained
# what torch.distributed.checkpoint describes its shards with
METADATA = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "ChunkStorageMetadata"),
        *("TensorStorageMetadata", "BytesStorageMetadata", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"),
    "pathlib._local": ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"),
    "collections": ("OrderedDict",),
}


class RefusedFileError(ValueError):
    """A file of a model or a checkpoint is not plain data."""


@contextmanager
def plain(what: Any) -> Iterator[None]:
    """RefusedFileError, naming `what` is read, for files that are not plain data."""
    try:
        yield
    except (pickle.UnpicklingError, SafetensorError) as error:
        first = next(iter(str(error).strip().splitlines()), "")
        raise RefusedFileError(
            f"{what} has a file that is damaged, or holds more than tensors, numbers and texts, "
            f"such as code, and is not loaded ({type(error).__name__}: {first[:200]})"
        ) from error


def load_model(name: str, **options: Any) -> Any:
    """`AutoModelForCausalLM.from_pretrained`; the model's own code only where that is asked for.

    Raises:
        RefusedFileError: the model brings code along, or its weights are no plain data.
        ValueError, OSError: of `from_pretrained`.
    """
    from transformers import AutoModelForCausalLM

    check_adapter(name)
    if not any(options.get(key) for key in KERNELS):
        _check_kernels(name, {key: options[key] for key in _WHERE if key in options})
    with plain(name):
        return AutoModelForCausalLM.from_pretrained(name, **{"trust_remote_code": False, **options})


def load_tokenizer(name: str | Path, **options: Any) -> Any:
    """`AutoTokenizer.from_pretrained`; the tokenizer's own code only where that is asked for."""
    from transformers import AutoTokenizer

    with plain(name):
        return AutoTokenizer.from_pretrained(name, **{"trust_remote_code": False, **options})


def check_adapter(folder: str | Path) -> None:
    """RefusedFileError for an adapter that names modules for peft to import."""
    path = Path(folder) / "adapter_config.json"
    if not path.is_file():
        return
    config = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(config, dict) and config.get(IMPORTS):
        raise RefusedFileError(f"{path} has {IMPORTS}, with which it names a module to import")


def check_shards(folder: Path) -> None:
    """RefusedFileError unless torch.distributed.checkpoint can unpickle a checkpoint's metadata
    without running anything."""
    for path in sorted(folder.rglob(".metadata")):
        with plain(folder), path.open("rb") as file:
            try:
                _Metadata(file).load()
            except pickle.UnpicklingError:
                raise
            except Exception as error:  # what a damaged pickle ends in
                raise pickle.UnpicklingError(f"{path}: {error}") from error


class _Metadata(pickle.Unpickler):
    """Makes nothing but what metadata consists of."""

    def find_class(self, module: str, name: str) -> Any:
        import torch

        kinds = (torch.dtype, torch.layout, torch.memory_format)
        if name in METADATA.get(module, ()) or (module, name) == ("torch", "Size"):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), kinds):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{module}.{name} is nothing that metadata consists of")


def _check_kernels(name: str, where: dict[str, Any]) -> None:
    from transformers import PretrainedConfig

    try:
        config, _ = PretrainedConfig.get_config_dict(name, **where)
    except OSError:  # from_pretrained says better what is missing
        return
    for key, value in _kernels_in(config):
        raise RefusedFileError(
            f"the configuration of {name} has {key}={value!r}, which is a repository of programs: "
            f"remove it, or ask for it yourself, model_init_kwargs={{{key!r}: {value!r}}}"
        )


def _kernels_in(config: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(config, Mapping):
        for key, value in config.items():
            if key in KERNELS and "/" in str(value):
                yield key, value
            else:
                yield from _kernels_in(value)
