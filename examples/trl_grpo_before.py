"""GRPO with TRL: python examples/trl_grpo_before.py [MODEL] [STEPS] [FOLDER]."""

import sys

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

MODEL, STEPS, FOLDER = [*sys.argv[1:], *["Qwen/Qwen3-0.6B", "100", "runs/trl"][len(sys.argv) - 1 :]]
PROMPTS = [f"Name a colour that starts with {letter}." for letter in "abcdefgh"]


def short(completions, **columns):
    return [-len(text) / 100 for text in completions]


trainer = GRPOTrainer(
    model=MODEL,
    reward_funcs=short,
    args=GRPOConfig(
        output_dir=FOLDER,
        bf16=torch.cuda.is_available(),
        max_steps=int(STEPS),
        num_generations=4,
        per_device_train_batch_size=4,
        max_completion_length=16,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    ),
    train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
)
trainer.train()
