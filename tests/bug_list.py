"""Faults that users have met in comparable software, and the tests that keep them out of here.

    python tests/bug_list.py

writes docs/bug-list.md. A test's docstring begins with the ids of the faults that it keeps out.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
DOCUMENT = FOLDER.parent / "docs" / "bug-list.md"

SECTIONS = {
    "N": "Numerics",
    "S": "Shapes, masks, labels, indexing",
    "R": "Reduction and normalisation",
    "D": "Distributed and sharded weights",
    "M": "Memory and speed",
    "I": "Integration, autograd, API",
    "K": "Kernels and their tools",
    "T": "Trainer and rewards",
}

# id -> what went wrong for somebody
ENTRIES = {
    "N1": "columns that pad the last tile count in the softmax: log-probabilities above 0",
    "N2": "NaN, or another result, when all logits are strongly negative",
    "N4": "the k3 estimator overflows, and its gradient is 0 times infinity",
    "N5": "a masked token that overflows makes gradients NaN, since masks multiply",
    "N6": "NaN entropies where a class has no probability",
    "N7": "the entropy bonus has no gradient",
    "N8": "entropies without the temperature beside log-probabilities with it",
    "N9": "the temperature is missing in the policy, the reference or the sampler",
    "N10": "a softcap that caps nothing, or scale and cap in the wrong order",
    "N11": "the head's bias counts several times",
    "N12": "the weight's gradient loses digits with every chunk that is added in 16 bits",
    "N13": "1 - p is rounded away for confident tokens: gradients of 0",
    "N14": "a gradient passes through a buffer of 16 bits",
    "N15": "small gradients are left out by default",
    "N16": "fp16 logits overflow",
    "N17": "a temperature of 0 divides",
    "N18": "log-probabilities above 0 by rounding",
    "N19": "accuracy falls off above 250,000 entries",
    "S1": "no gradient below the head for inputs that are not contiguous",
    "S3": "sliced hidden states crash",
    "S4": "offsets beyond 2^31 elements wrap",
    "S6": "vocabularies beyond a block's largest size are refused, or slow",
    "S8": "ids outside the vocabulary give plausible numbers",
    "S10": "a batch that is all masked has no graph",
    "S11": "masks read off the padding id drop a real end of sequence",
    "S13": "masks off by one are broadcast or crash",
    "S14": "labels of the whole sequence beside a part of the hidden states",
    "S15": "packed and padded inputs do not give the same",
    "S16": "a mask of another length than the completions",
    "S17": "logits taken for hidden states",
    "S18": "zero gradients where few of many tokens count",
    "S19": "padding on the left shifts positions",
    "S20": "old and new log-probabilities differ at the first step",
    "R1": "a fused path drops options silently",
    "R2": "the divisor is wrong when sampling spans several optimizer steps",
    "R3": "means of means: gradients depend on micro-batches and ranks",
    "R4": "a mask in the numerator that the denominator does not know",
    "R5": "0 / 0 where everything is masked",
    "R6": "all tokens get the upstream gradient of the first",
    "R8": "an evaluation's loss divided by an option of training",
    "R9": "means over the batch where means over each sequence were meant",
    "R11": "masked tokens move a statistic that others are centred on",
    "R12": "a loss grows with accumulation or with the number of ranks",
    "R13": "a loss type's reduction, or the bonus's, differs from where it comes from",
    "R14": "bounds of the ratio taken for distances from 1",
    "R15": "the corrected KL changes gradients on policy, unannounced",
    "D1": "the loss bypasses the wrapped model: gradients are not averaged",
    "D2": "a partitioned head has no elements, or is freed before the backward",
    "D3": "ranks with more tokens call more collectives, and wait for ever",
    "D4": "sharded weights are read as if they were whole",
    "D5": "a flattened parameter reaches the loss",
    "D6": "views of weights are modified; a trained copy of the head is not the one that is read",
    "D7": "reading a weight without its module's forward skips the module's hooks",
    "D8": "sequence parallelism: divisors of the wrong group",
    "D9": "kernels launch on another device than their tensors'",
    "D11": "a tied head has no weight of its own",
    "M1": "memory of [tokens, vocabulary]",
    "M2": "logits of prompts, and entropies that nobody asked for",
    "M3": "the chunk size is ignored in training, or bounds nothing there",
    "M4": "a frozen head's gradient is computed and thrown away",
    "M6": "a chunk size that is slow, or exceeds its budget",
    "M8": "slower than log-probabilities and a plain loss",
    "M9": "a loop over rows",
    "M10": "gradients of an entropy whose coefficient is 0",
    "M11": "nothing is saved on a small model, and nobody says so",
    "I1": "adapters on the head are ignored",
    "I2": "options, auxiliary losses and objectives are dropped in the fused path",
    "I3": "masks with holes are ignored",
    "I4": "what a model takes beside the ids is not passed on",
    "I5": "two patches of the same function",
    "I6": "a new release has another signature",
    "I7": "inputs of two dtypes fail, often only in the backward",
    "I11": "triton is imported where it is not needed",
    "I12": "compiled results are wrong, or compiled anew all the time",
    "I13": "requires_grad is asked inside an operator, where it is always false",
    "I14": "an error for what is supported by now",
    "I15": "a reference given twice raises a warning as an error",
    "K1": "interpreted kernels multiply bit patterns of bf16",
    "K2": "an output that is not used aliases one that is",
    "K3": "tuning runs kernels several times on the same buffers",
    "K4": "fp32 products in TF32",
    "K5": "kernels that do not compile, or do not fit into shared memory",
    "K6": "versions of torch and triton that the code has not seen",
    "T1": "a reward of None makes the loss 0 and its gradient NaN",
    "T3": "groups and batch sizes that do not fit, without a word on what does",
    "T4": "NaN log-probabilities of a sampler crash or pass through",
    "T5": "truncated sampling biases ratios by the mass that was kept",
    "T6": "groups without variance still have the gradient of the KL",
    "T7": "clip ratios of 0 on policy, taken for a fault",
    "T8": "loss 0 and gradient NaN with accumulation",
    "T9": "advantages normalised over the batch, not over groups",
    "T10": "dropout in the loss and not in the samples",
    "T11": "sentinels of masked tokens in the metrics",
}

# id -> where, in GitHub's issues and pull requests
REPORTED = {
    "N1": "verl#2656, #2899, #5349",
    "N2": "verl#7439, SkyRL#2141",
    "N4": "trl#3015, OpenRLHF#1160, slime#2198",
    "N5": "prime-rl#2084, Soup#342, #1084",
    "N6": "trl#7221, SkyRL#2259",
    "N7": "trl#6625",
    "N8": "OpenRLHF#1319",
    "N9": "trl#3029, #4159, NeMo-RL#316",
    "N10": "unsloth-zoo#593, trl#5691",
    "N11": "ml-cross-entropy#52, #53",
    "N12": "Liger-Kernel#512, #1391, OLMo-core#370",
    "N13": "Liger-Kernel#1329",
    "N14": "TransformerEngine#3193",
    "N15": "ml-cross-entropy#14, #18",
    "N16": "unsloth-zoo#599",
    "N17": "trl#3640, slime#2197, #2297",
    "N18": "maxtext#5231",
    "N19": "Megatron-LM#2206",
    "S1": "verl#7235, VeOmni#1017",
    "S3": "unsloth-zoo#591",
    "S4": "ml-cross-entropy#37, #39, Liger-Kernel#1296",
    "S6": "unsloth#7, #19, #91",
    "S8": "axolotl#3767, pytorch#195829",
    "S10": "trl#7077, #6859, #6842",
    "S11": "trl#4974, unsloth#6738",
    "S13": "unsloth#4081, #4149, #4181",
    "S14": "verl#3723, #3724",
    "S15": "verl#6846",
    "S16": "trl#5144",
    "S17": "unsloth-zoo#708, unsloth#5121, #5244",
    "S18": "unsloth#5230, #7012",
    "S19": "unsloth-zoo#840",
    "S20": "unsloth#4502",
    "R1": "Liger-Kernel#1082, #1088, trl#5031",
    "R2": "trl#5619, #6024",
    "R3": "verl#5625, SkyRL#925, twinkle#292",
    "R4": "trl#6369, #6439, #7068",
    "R5": "unsloth-zoo#1286, #1262, trl#3248",
    "R6": "Liger-Kernel#968, #678, #488",
    "R8": "unsloth#11337, #6523",
    "R9": "Liger-Kernel#626, #628",
    "R11": "Soup#723",
    "R12": "transformers#37766, #34373, trl#6478",
    "R13": "Liger-Kernel#1160, trl#6140",
    "R14": "prime-rl#858",
    "R15": "trl#6503",
    "D1": "trl#7245, #7246, #7247",
    "D2": "trl#3368, #5891, #4544",
    "D3": "trl#6696, #6694, #6698",
    "D4": "ml-cross-entropy#31, NeMo-Automodel#1087, torchtune#2800",
    "D5": "Liger-Kernel#332, LlamaFactory#5941",
    "D6": "Liger-Kernel#48, #631",
    "D7": "NeMo-RL#2833",
    "D8": "transformers#42414",
    "D9": "triton#2441, #5205, Liger-Kernel#401",
    "D11": "verl#3849",
    "M1": "trl#3678, #4585, #2709",
    "M2": "slime#2253, #1523, #1951",
    "M3": "NeMo-RL#2871, #4222, #4114",
    "M4": "Liger-Kernel#1441, prime-rl#3011, trl#7076",
    "M6": "Liger-Kernel#1414, #1439, #395",
    "M8": "AgileRL#522, Liger-Kernel#1294",
    "M9": "trl#7125",
    "M10": "verl#1720",
    "M11": "Liger-Kernel#941",
    "I1": "trl#4612, #5676",
    "I2": "trl#6808, #7270, #5595",
    "I3": "trl#4975",
    "I4": "trl#6697, #5943",
    "I5": "verl#1720",
    "I6": "ms-swift#7052, #4966, unsloth#2738",
    "I7": "Liger-Kernel#305, #501, LlamaFactory#5583",
    "I11": "ml-cross-entropy#41",
    "I12": "pytorch#180642, Liger-Kernel#174, #1160",
    "I13": "pytorch#188296",
    "I14": "trl#4947, #4948",
    "I15": "Liger-Kernel's source",
    "K1": "triton#11584, #11585, #4972",
    "K2": "Liger-Kernel#507, #508",
    "K3": "triton#4217, #6547, #54",
    "K4": "triton#5895",
    "K5": "ml-cross-entropy#45, #53, marin#3159",
    "K6": "linear_cross_entropy_loss#1, ml-cross-entropy#6, Liger-Kernel#916",
    "T1": "ms-swift#8123, trl#5773, #5775",
    "T3": "trl#3566, #3017, ms-swift#3980",
    "T4": "trl#6166, #6296, #6693",
    "T5": "trl#6789, #7269, prime-rl#2600",
    "T6": "trl#5597, #7068",
    "T7": "trl#3120, #3294, minimind#775",
    "T8": "unsloth#3006",
    "T9": "grpo-flat#2",
    "T10": "unsloth-zoo#832",
    "T11": "trl#2496, #6121",
}

# id -> why no test here can keep it out
ELSEWHERE: dict[str, str] = {}

ID = rf"[{''.join(SECTIONS)}]\d{{1,2}}"
# What a docstring begins with: "N1: ...", "N1, N2: ..." or "N1."; further on it may mean others.
IDS = re.compile(rf"({ID}(?:,\s+{ID})*)[:.]")
# marks of tests that CI does not run
NOT_IN_CI = ("pytest.mark.gpu", "pytest.mark.slow")


def ids_of(function: ast.FunctionDef) -> list[str]:
    """The entries that a test keeps out."""
    found = IDS.match(ast.get_docstring(function) or "")
    return [] if found is None else re.findall(ID, found[1])


def _named(assign: ast.Assign, name: str) -> bool:
    return any(isinstance(x, ast.Name) and x.id == name for x in assign.targets)


def found(ci: bool = False) -> dict[str, list[str]]:
    """id -> the tests (and cases that `test_distributed` runs on ranks) that name it.

    `ci`: only those that need neither a GPU nor minutes.
    """
    tests: dict[str, list[str]] = defaultdict(list)
    for path in sorted([*FOLDER.glob("test_*.py"), *FOLDER.glob("ranks_*.py")]):
        body = ast.parse(path.read_text()).body
        of_module = [n for n in body if isinstance(n, ast.Assign) and _named(n, "pytestmark")]
        for node in body:
            if not isinstance(node, ast.FunctionDef):
                continue
            marks = " ".join(map(ast.unparse, [*of_module, *node.decorator_list]))
            if ci and any(mark in marks for mark in NOT_IN_CI):
                continue
            if node.name.startswith("test_") or path.name.startswith("ranks_"):
                for name in ids_of(node):
                    tests[name].append(f"{path.stem}::{node.name.removeprefix('test_')}")
    return tests


def document() -> str:
    """docs/bug-list.md."""
    tests, lines = found(), [HEAD]
    for letter, title in SECTIONS.items():
        lines += [
            f"## {title}",
            "",
            "| | what went wrong elsewhere | reported in | tests |",
            "|---|---|---|---|",
        ]
        for name in (name for name in ENTRIES if name.startswith(letter)):
            kept_out = ", ".join(f"`{test}`" for test in dict.fromkeys(tests.get(name, [])))
            last = kept_out or ELSEWHERE.get(name, "")
            lines.append(f"| {name} | {ENTRIES[name]} | {REPORTED[name]} | {last} |")
        lines.append("")
    return "\n".join(lines)


HEAD = f"""\
# Faults of others, and the tests that keep them out

{len(ENTRIES)} kinds of faults that users of comparable software have reported in public, and for
each of them the tests that hold the right values here. `python tests/bug_list.py` reads them off
the docstrings of the tests; a test fails when an entry has none.
"""

if __name__ == "__main__":
    DOCUMENT.write_text(document())
    print(f"wrote {DOCUMENT}", file=sys.stderr)
