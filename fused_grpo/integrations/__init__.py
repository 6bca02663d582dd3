"""Adapters between fused_grpo and other libraries; each imports its library lazily."""
