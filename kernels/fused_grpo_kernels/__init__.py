"""Triton kernels of fused-grpo: tensors in, tensors out; no autograd, nothing imported eagerly."""
