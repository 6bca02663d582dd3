"""Benchmarks of fused-grpo: run `python -m benchmarks.loss` from the repository root."""
