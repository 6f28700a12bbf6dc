"""`spmdflow weights` shows which elements of a model's tensors each rank has."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.families.tiny import save_tiny_model
from spmdflow.show_weights import FINISHED, REFUSED, main


def test_rows_of_a_mixture_and_the_generator_s_whole_tensors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_tiny_model("qwen3_moe", tmp_path)
    capsys.readouterr()

    code = main([str(folder), "--ranks", "2", "--rank", "1", "--match", "layers.0.mlp"])

    out = capsys.readouterr().out
    assert code == FINISHED
    assert out.count("the ranks together have every element") == 2
    assert "trains with fsdp" in out and "generates with builtin" in out
    experts = "model.layers.0.mlp.experts.gate_up_proj"
    assert f"  rank 1  {experts} (4, 64, 64) = [4:8, 0:64, 0:64]" in out
    assert f"  rank 1  {experts} (8, 64, 64) = [0:8, 0:64, 0:64]" in out
    assert "rank 0  model" not in out


def test_megatron_to_vllm_shows_what_is_fused_and_padded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_tiny_model("llama", tmp_path)
    capsys.readouterr()
    words = ["--ranks", "2", "--match", "mlp", "--engine", "megatron", "--layout", "t2"]

    assert main([str(folder), *words, "--generator", "vllm", "--generation", "t2"]) == FINISHED

    out = capsys.readouterr().out
    assert "linear_fc1.weight (96, 64) = model.layers.0.mlp.gate_proj.weight[0:48, 0:64] + " in out
    assert "gate_up_proj.weight (96, 64) = model.layers.0.mlp.gate_proj.weight[48:96, 0:64]" in out


def test_experts_of_each_rank_under_megatron_and_vllm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_tiny_model("qwen3_moe", tmp_path)
    capsys.readouterr()
    words = ["--ranks", "2", "--rank", "1", "--engine", "megatron", "--layout", "e2"]

    assert main([str(folder), *words, "--generator", "vllm", "--generation", "t2"]) == FINISHED

    out = capsys.readouterr().out
    assert "trains with megatron" in out and out.count("every element") == 2
    first = "model.layers.0.mlp.experts.gate_up_proj[4:5, 0:32, 0:64]"
    assert f"local_experts.0.linear_fc1.weight (64, 64) = {first}" in out
    assert "local_experts.4" not in out
    half = "model.layers.0.mlp.experts.gate_up_proj[0:8, 16:32, 0:64]"
    assert f"experts.routed_experts.w13_weight (8, 32, 64) = {half}" in out


def test_recorded_table_of_a_family_on_several_ranks_is_shown_without_vllm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_tiny_model("gpt_oss", tmp_path)
    capsys.readouterr()
    words = ["--ranks", "4", "--rank", "3", "--match", "experts", "--generator", "vllm"]

    assert main([str(folder), *words, "--generation", "t2p2"]) == FINISHED

    out = capsys.readouterr().out
    assert out.count("the ranks together have every element") == 2
    half = "model.layers.1.mlp.experts.down_proj[0:8, 48:96, 0:64] along axes (0, 2, 1)"
    assert f"routed_experts.w2_weight (8, 64, 48) = {half}" in out
    assert "routed_experts.w2_bias (8, 64) = padding" in out  # added on the first rank


@pytest.mark.parametrize(
    ("family", "words", "message"),
    [
        ("llama", ["--layout", "t2p"], "--layout: got 't2p'"),
        ("llama", ["--ranks", "4", "--layout", "d2"], "got d2 with t1p1 on a pool of 4"),
        ("qwen2_moe", ["--engine", "megatron"], "model_type 'qwen2_moe'"),
        (
            "minimax_m2",
            ["--ranks", "2", "--generator", "vllm", "--generation", "t2"],
            "expected t1",
        ),
    ],
)
def test_what_cannot_be_shown_is_refused(
    family: str,
    words: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = save_tiny_model(family, tmp_path)

    assert main([str(folder), *words]) == REFUSED

    assert message in capsys.readouterr().err
