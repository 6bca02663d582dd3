"""`fused-grpo doctor` tells what is there, and fails where something is wrong."""

from __future__ import annotations

import json
import subprocess
from types import SimpleNamespace

import pytest
import torch

import fused_grpo.loss
from fused_grpo import cli, doctor


@pytest.fixture
def quick(monkeypatch):
    """Without the compilations, which other tests do."""
    monkeypatch.setattr(
        doctor, "compile_kernels", lambda target: doctor.Kernels(target, "left out")
    )


@pytest.fixture
def cpu_only(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_it_reports_versions_devices_backends_and_numbers(quick, capsys):
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert f"torch         {torch.__version__}" in printed
    assert 'on cpu, backend="auto" is ' in printed
    for backend in ("chunked", "reference"):
        for dtype in ("float32", "bfloat16"):
            (line,) = (x for x in printed.splitlines() if f"{backend} on cpu, {dtype}: loss" in x)
            assert line.endswith(": ok")
    assert printed.endswith("all is well\n")


def test_json_holds_the_same(quick, capsys):
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["failures"] == []
    assert report["versions"]["torch"] == torch.__version__
    works = {
        (x["backend"], x["device"], x["dtype"])
        for x in report["numbers"]
        if x["ok"] and x["errors"]
    }
    for device, backends in report["backends"].items():
        for backend, reason in backends.items():
            for dtype in ("float32", "bfloat16"):
                assert ((backend, device, dtype) in works) == (reason is None)
    assert report["chosen"]["cpu"] == "chunked"  # interpreted kernels are for those who ask


@pytest.mark.parametrize("factor", [1.001, float("nan")])
@pytest.mark.parametrize("what", ["value", "gradient"])
def test_wrong_numbers_fail(quick, capsys, monkeypatch, what, factor):
    true = fused_grpo.loss.grpo_loss

    def wrong(*args, **options):
        out = true(*args, **options)
        if options["backend"] == "chunked":
            value = out.loss.detach()
            if what == "value":
                out.loss = out.loss + value * (factor - 1)
            else:
                out.loss = out.loss * factor + value * (1 - factor)
        return out

    monkeypatch.setattr(fused_grpo.loss, "grpo_loss", wrong)
    assert cli.main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "FAILED: wrong numbers: chunked on cpu in float32" in printed
    assert "wrong numbers: reference" not in printed


def test_a_backend_that_raises_fails_and_the_others_are_still_checked(quick, capsys, monkeypatch):
    true = fused_grpo.loss.grpo_loss

    def broken(*args, **options):
        if options["backend"] == "chunked":
            raise RuntimeError("no such luck")
        return true(*args, **options)

    monkeypatch.setattr(fused_grpo.loss, "grpo_loss", broken)
    assert cli.main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "failed, RuntimeError: no such luck" in printed
    assert "reference on cpu, float32: loss" in printed


def test_it_says_how_each_dtype_is_multiplied(quick, capsys):
    if doctor.backends_on("cpu")["triton"] is not None:
        pytest.skip("Triton does not interpret its kernels here")
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "triton in bfloat16: one product fused" in printed
    assert "triton in float16: fused without gradients; with them torch's product" in printed
    assert "triton in float32: torch's product and a fold: operands are torch.float32" in printed


# --- kernels -------------------------------------------------------------------------------------


def test_without_a_gpu_or_a_name_nothing_is_compiled():
    kernels = doctor.compile_kernels(None)
    assert "--target" in kernels.reason
    assert not kernels.rows


def test_without_triton_nothing_is_compiled(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda name: None)
    assert doctor.compile_kernels("sm_90").reason == "triton is not installed"


def test_it_compiles_for_a_named_chip(monkeypatch, capsys):
    pytest.importorskip("triton")
    monkeypatch.setattr(doctor, "check_numbers", lambda *_: pytest.fail("not asked for"))
    left_out = {"chunked": "left out", "triton": "left out"}
    monkeypatch.setattr(doctor, "backends_on", lambda device: left_out)
    assert cli.main(["doctor", "--target", "sm_90"]) == 0
    printed = capsys.readouterr().out
    assert "kernels for sm_90:" in printed
    assert "registers, no spills" in printed


def test_an_unknown_chip_is_an_error_of_the_caller(capsys):
    pytest.importorskip("triton")
    assert cli.main(["doctor", "--target", "h200"]) == 2
    assert "'h200' is no target" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "printed", "said"),
    [
        (1, '{"kernel": "k", "config": "c", "problems": ["spills: 8 bytes"]}\n', "k: spills"),
        (1, "", "the static gate: did not finish: ptxas is missing"),
    ],
)
def test_kernels_that_do_not_pass_fail(monkeypatch, status, printed, said):
    done = subprocess.CompletedProcess([], status, printed, "trace\nptxas is missing\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    monkeypatch.setattr(doctor, "_version", lambda name: "3.9.0")
    kernels = doctor.compile_kernels("sm_90")
    assert len(kernels.failures) == 1
    assert kernels.failures[0].startswith(said)
    report = doctor.Report({}, {"gpus": []}, {}, {}, {}, kernels, [])
    assert report.failures == kernels.failures


# --- machines that are not here ------------------------------------------------------------------


def test_a_gpu_is_named_with_its_target(monkeypatch):
    h200 = SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, total_memory=141 * 2**30, gcnArchName=""
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: h200)
    monkeypatch.setattr(torch.version, "hip", None)
    assert doctor.machine()["gpus"] == [{"name": "NVIDIA H200", "target": "sm_90", "gib": 141}]
    mi300 = SimpleNamespace(name="MI300X", total_memory=192 * 2**30, gcnArchName="gfx942:sramecc+")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: mi300)
    assert doctor.machine()["gpus"][0]["target"] == "gfx942"


def test_no_triton_is_a_reason_not_a_crash(monkeypatch):
    def broken(*_, **__):
        raise ImportError("libtriton.so: no such file")

    monkeypatch.setattr(doctor, "why_not_triton", broken)
    reasons = doctor.backends_on("cpu")
    assert reasons["triton"] == "triton cannot be imported: libtriton.so: no such file"
    assert reasons["chunked"] is None


def test_unknown_options_are_refused(capsys):
    assert cli.main(["doctor", "--frobnicate", "1"]) == 2
    assert "--frobnicate" in capsys.readouterr().err
