"""Files of models and checkpoints are data: what would run when it is read is refused."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_runs import crash, trainer

from fused_grpo.cli import main
from fused_grpo.trainer import GRPOTrainer
from fused_grpo.trainer.checkpoints import BrokenCheckpointError
from fused_grpo.trainer.loading import (
    RefusedFileError,
    check_shards,
    load_tokenizer,
)
from fused_grpo.trainer.models import load, tiny, with_adapter
from fused_grpo.trainer.rollouts.servers import VLLMServer


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


@pytest.fixture
def marker(tmp_path):
    path = tmp_path / "marker"
    yield path
    assert not path.exists(), "code in a file was run"


def as_torch(path: Path, marker: Path) -> None:
    torch.save({"weight": Payload(marker)}, path)


def as_pickle(path: Path, marker: Path) -> None:
    path.write_bytes(pickle.dumps({"weight": Payload(marker)}, protocol=4))


FORMS = {"torch.save": as_torch, "pickle": as_pickle}


def test_the_payload_works(tmp_path):
    """What all others here would miss, were it not so."""
    for name, write in FORMS.items():
        marker = tmp_path / name
        write(tmp_path / "file", marker)
        if name == "pickle":
            pickle.loads((tmp_path / "file").read_bytes())
        else:
            torch.load(tmp_path / "file", weights_only=False)
        assert marker.is_dir()


def trust(folder: Path, *names: str) -> None:
    """Have the manifest say that these files are what was written: whoever changes them can."""
    body = json.loads((folder / "manifest.json").read_text())
    del body["sha256"]
    for name in names:
        data = (folder / name).read_bytes()
        entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        body["files"][name] = entry
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps({**body, "sha256": digest}))


# ---- resuming ------------------------------------------------------------------------------------

READ = (
    *("optimizer.pt", "scheduler.pt", "rng_state.pth", "model.safetensors"),
    *("run_state.safetensors", "process_state_0.safetensors", "trainer_state.json"),
)


@pytest.fixture(scope="module")
def crashed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("crashed") / "run"
    crash(folder, 1)
    return folder


@pytest.fixture
def checkpoint(crashed, tmp_path):
    shutil.copytree(crashed, tmp_path / "run")
    return tmp_path / "run" / "checkpoint-1"


def test_every_file_of_a_checkpoint_is_known_here(crashed):
    """A file that is new in it has to be thought about."""
    unread = {"manifest.json", "training_args.bin", "metrics.jsonl", "config.json"}
    unread |= {"generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    found = {path.name for path in (crashed / "checkpoint-1").iterdir()}
    assert found == unread | set(READ)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [*READ, "training_args.bin"])
def test_a_pickle_in_a_checkpoint_is_noticed(checkpoint, marker, name, form):
    FORMS[form](checkpoint / name, marker)
    with pytest.raises(BrokenCheckpointError, match=f"{name} has .* bytes|{name} is damaged"):
        trainer(checkpoint.parent).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", READ)
def test_a_pickle_that_the_manifest_vouches_for_is_refused(checkpoint, marker, name, form):
    FORMS[form](checkpoint / name, marker)
    trust(checkpoint, name)
    text = name == "trainer_state.json"
    kind, words = RefusedFileError, "checkpoint-1 has a file that .* holds more than tensors"
    if text:
        kind, words = BrokenCheckpointError, r"trainer_state\.json is damaged"
    with pytest.raises(kind, match=words):
        trainer(checkpoint.parent).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["pytorch_model.bin", "training_args.bin", "state.pkl"])
def test_a_pickle_beside_what_is_read_is_never_opened(checkpoint, marker, name, form):
    FORMS[form](checkpoint / name, marker)
    trust(checkpoint, name)
    run = trainer(checkpoint.parent, max_steps=2)
    run.train(resume_from_checkpoint=True)
    assert run.state.global_step == 2


@pytest.mark.parametrize("form", FORMS)
def test_weights_in_place_of_safetensors_are_refused(checkpoint, marker, form):
    (checkpoint / "model.safetensors").unlink()
    FORMS[form](checkpoint / "pytorch_model.bin", marker)
    body = json.loads((checkpoint / "manifest.json").read_text())
    del body["files"]["model.safetensors"]
    (checkpoint / "manifest.json").write_text(json.dumps(body))
    trust(checkpoint, "pytorch_model.bin")
    with pytest.raises(RefusedFileError, match="holds more than tensors"):
        trainer(checkpoint.parent).train(resume_from_checkpoint=True)


def test_metadata_of_shards_may_hold_nothing_else(tmp_path, marker):
    """FSDP's: torch unpickles it without a look."""
    (tmp_path / "pytorch_model_fsdp_0").mkdir()
    path = tmp_path / "pytorch_model_fsdp_0" / ".metadata"
    for data in (
        pickle.dumps(Payload(marker)),
        pickle.dumps({"state_dict_metadata": Payload(marker)}, protocol=2),
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"ctorch\nload\n(S'x'\ntR.",
        b"ctorch.serialization\nload\n(S'x'\ntR.",
        b"not a pickle",
        b"",
    ):
        path.write_bytes(data)
        with pytest.raises(RefusedFileError, match="holds more than tensors"):
            check_shards(tmp_path)


def test_metadata_as_torch_writes_it_passes(tmp_path):
    import torch.distributed.checkpoint as dcp

    state = {"a": torch.ones(3, dtype=torch.bfloat16), "b": {"lr": 0.1, "n": [1, None, "x"]}}
    dcp.save(state, checkpoint_id=tmp_path / "shards", no_dist=True)
    assert (tmp_path / "shards" / ".metadata").exists()
    check_shards(tmp_path)


def test_a_run_looks_at_the_shards_before_it_resumes(checkpoint, marker):
    (checkpoint / "optimizer_0").mkdir()
    as_pickle(checkpoint / "optimizer_0" / ".metadata", marker)
    trust(checkpoint, "optimizer_0/.metadata")
    with pytest.raises(RefusedFileError, match="metadata consists of"):
        trainer(checkpoint.parent).train(resume_from_checkpoint=True)


# ---- models --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    model, tokenizer = tiny(torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def model_folder(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "model")
    return tmp_path / "model"


def changed(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_a_model_whose_weights_are_a_pickle_is_refused(model_folder, marker, name, form, capsys):
    (model_folder / "model.safetensors").unlink()
    FORMS[form](model_folder / name, marker)
    with pytest.raises(ValueError, match="holds more than tensors"):
        load(str(model_folder), torch.float32)
    with pytest.raises(ValueError, match="holds more than tensors"):
        GRPOTrainer(str(model_folder), len, train_dataset=[{"prompt": "a"}])
    code = main(["eval", "--model", str(model_folder), "--task", "copy", "--max-samples", "1"])
    assert code == 2


CODE = "import os\nos.mkdir({marker!r})\nfrom transformers import LlamaForCausalLM as Mine\n"


@pytest.mark.parametrize("answer", ["y", ""])
@pytest.mark.parametrize("known", [True, False])
def test_code_of_a_model_is_not_run(model_folder, marker, monkeypatch, known, answer):
    """Nor is anybody asked: transformers would ask at a terminal, and run it after a y."""
    (model_folder / "code.py").write_text(CODE.format(marker=str(marker)))
    classes = {"AutoConfig": "code.Mine", "AutoModelForCausalLM": "code.Mine"}
    kind = {} if known else {"model_type": "mine"}
    changed(model_folder / "config.json", auto_map=classes, **kind)
    changed(model_folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["code.Mine", None]})
    monkeypatch.setattr("builtins.input", lambda *_: answer)
    if known:
        load(str(model_folder), torch.float32)  # by the class of transformers, which fits
    else:
        with pytest.raises(ValueError, match="trust_remote_code=True"):
            load(str(model_folder), torch.float32)
        with pytest.raises(ValueError, match="trust_remote_code=True"):
            GRPOTrainer(str(model_folder), len, train_dataset=[{"prompt": "a"}])


def test_code_of_a_tokenizer_is_not_run(model_folder, marker, monkeypatch):
    (model_folder / "code.py").write_text(CODE.format(marker=str(marker)))
    for name in ("tokenizer.json", "config.json"):
        (model_folder / name).unlink()
    settings = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["code.Mine", None]}}
    changed(model_folder / "tokenizer_config.json", **settings)
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        load_tokenizer(model_folder)


def test_code_that_was_asked_for_runs(model_folder, tmp_path):
    """Or the refusals above would say nothing. In a process of its own, as it changes classes."""
    asked = tmp_path / "asked"
    (model_folder / "code.py").write_text(CODE.format(marker=str(asked)))
    changed(model_folder / "config.json", auto_map={"AutoModelForCausalLM": "code.Mine"})
    program = (
        "import sys; from fused_grpo.trainer.loading import load_model; "
        "load_model(sys.argv[1], trust_remote_code=True)"
    )
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", program, str(model_folder)]
    subprocess.run(command, env=environment, check=True, timeout=200)
    assert asked.is_dir()


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
@pytest.mark.parametrize("value", ["evil/kernel", {"text_config": "evil/kernel@v1"}])
def test_a_configuration_names_no_kernels(model_folder, key, value):
    changed(model_folder / "config.json", **{key: value})
    with pytest.raises(RefusedFileError, match=r"evil/kernel.*model_init_kwargs"):
        load(str(model_folder), torch.float32)
    changed(model_folder / "config.json", **{key: None}, text_config={key: value})
    with pytest.raises(RefusedFileError, match="evil/kernel"):
        load(str(model_folder), torch.float32)
    changed(model_folder / "config.json", **{key: "sdpa"}, text_config=None)
    load(str(model_folder), torch.float32)


@pytest.fixture
def adapter(tmp_path):
    peft = pytest.importorskip("peft")
    model, _ = tiny(torch.float32)
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(
        tmp_path / "adapter"
    )
    return tmp_path / "adapter"


@pytest.mark.parametrize("form", FORMS)
def test_an_adapter_that_is_a_pickle_is_refused(adapter, marker, form):
    (adapter / "adapter_model.safetensors").unlink()
    FORMS[form](adapter / "adapter_model.bin", marker)
    with pytest.raises(RefusedFileError, match="holds more than tensors"):
        with_adapter(tiny(torch.float32)[0], str(adapter))


def test_an_adapter_names_no_module(adapter, marker, tmp_path, monkeypatch):
    (tmp_path / "evil_module.py").write_text(f"import os\nos.mkdir({str(marker)!r})\n")
    monkeypatch.syspath_prepend(tmp_path)
    changed(adapter / "adapter_config.json", megatron_config={"a": 1}, megatron_core="evil_module")
    with pytest.raises(RefusedFileError, match="megatron_config, with which it names a module"):
        with_adapter(tiny(torch.float32)[0], str(adapter))
    assert "evil_module" not in sys.modules


# ---- others --------------------------------------------------------------------------------------


def test_arrays_of_a_server_are_not_unpickled(marker):
    import base64
    import io

    import numpy as np

    file = io.BytesIO()
    np.save(file, np.array([Payload(marker)], dtype=object), allow_pickle=True)
    for data in (file.getvalue(), pickle.dumps(Payload(marker))):
        choice = {"routed_experts": base64.b64encode(data).decode()}
        with pytest.raises(ValueError, match=r"allow_pickle=False|[Pp]ickle"):
            VLLMServer._experts(None, [1], [2], choice, {})  # type: ignore[arg-type]


@pytest.mark.parametrize("command", ["plot", "completions"])
def test_records_of_a_run_are_not_unpickled(tmp_path, marker, command, caplog, capsys):
    for name in ("metrics.jsonl", "completions.jsonl", "warnings.jsonl"):
        as_pickle(tmp_path / name, marker)
    with caplog.at_level(logging.ERROR):
        assert main([command, str(tmp_path)]) in (0, 2)
