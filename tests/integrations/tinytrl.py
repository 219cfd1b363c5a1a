"""Small trainers of transformers and TRL, with data of their own: nothing is downloaded."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import datasets
import torch
import trl
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(125))]
KINDS = ("transformers", "without num_items_in_batch", "SFT", "DPO", "GRPO", "RLOO")


def tokenizer() -> Any:
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def model(folder: Path, **options: Any) -> Any:
    """A llama of two layers. It lies in a folder, as TRL reads the reference model from there."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=256, pad_token_id=0, bos_token_id=1,
        eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    return LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, **options)


class Plain(torch.nn.Module):
    """A model whose forward() takes no num_items_in_batch, so that its loss is a mean."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: Any, labels: Any, attention_mask: Any) -> Any:
        return self.inner(input_ids=input_ids, labels=labels, attention_mask=attention_mask)


def reward(completions: list[str], **others: Any) -> list[float]:
    """The even words of an answer."""
    return [sum(w[1:].isdigit() and int(w[1:]) % 2 == 0 for w in c.split()) / 10
            for c in completions]  # fmt: skip


def other_model(folder: Path, kind: str) -> Any:
    """A model of linear attention, "bamba" with layers of full attention between."""
    torch.manual_seed(0)
    sizes = {"vocab_size": len(WORDS), "hidden_size": 32, "num_hidden_layers": 2}
    sizes |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    config: Any = MambaConfig(**sizes, state_size=8)
    if kind == "bamba":
        config = BambaConfig(
            **sizes, intermediate_size=64, num_attention_heads=4, num_key_value_heads=4,
            attn_layer_indices=[1], mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8,
        )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / kind)
    return AutoModelForCausalLM.from_pretrained(folder / kind, dtype=torch.float32)


def trainer(kind: str, folder: Path, *, net: Any = None, **options: Any) -> Any:
    """A trainer of a batch of 8 rows with 3 to 20 tokens, for 4 updates."""
    draw = random.Random(1)

    def words(least: int, most: int) -> str:
        return " ".join(f"w{draw.randrange(125)}" for _ in range(draw.randrange(least, most)))

    arguments = {
        "output_dir": str(folder / "out"), "per_device_train_batch_size": 8, "max_steps": 4,
        "use_cpu": True, "logging_steps": 1, "save_strategy": "no", "report_to": [],
        "disable_tqdm": True, "seed": 1, "optim": "sgd", "learning_rate": 0.3, "bf16": False,
        "gradient_checkpointing": False,
    } | options  # fmt: skip
    net = model(folder) if net is None else net
    if kind in KINDS[:2]:
        rows = []
        for _ in range(48):
            ids = [draw.randrange(3, 128) for _ in range(draw.randrange(3, 20))]
            left = 20 - len(ids)
            rows.append({
                "input_ids": torch.tensor(ids + [0] * left),
                "labels": torch.tensor(ids + [-100] * left),
                "attention_mask": torch.tensor([1] * len(ids) + [0] * left),
            })  # fmt: skip
        return Trainer(
            net if kind == KINDS[0] else Plain(net), TrainingArguments(**arguments),
            train_dataset=rows,
        )  # fmt: skip
    rows = [
        {"text": words(3, 20)} if kind == "SFT"
        else {"prompt": words(4, 5), "chosen": " " + words(3, 15), "rejected": " " + words(3, 15)}
        if kind == "DPO" else {"prompt": words(4, 12)}
        for _ in range(48)
    ]  # fmt: skip
    more: dict[str, Any] = {}
    if kind in ("GRPO", "RLOO"):
        arguments |= {"num_generations": 4, "max_completion_length": 10}
        more["reward_funcs"] = reward
    config = getattr(trl, f"{kind}Config")(**arguments)
    return getattr(trl, f"{kind}Trainer")(
        net, args=config, train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer(), **more,
    )  # fmt: skip


def parameters(made: Any) -> torch.Tensor:
    """The parameters, those that are sharded as a whole."""
    whole = (getattr(p, "full_tensor", lambda p=p: p)() for p in made.model.parameters())
    return torch.cat([p.detach().flatten() for p in whole])


def logged(made: Any) -> list[dict[str, float]]:
    """What the trainer has logged, without times and memory."""
    left_out = ("memory/", "train_", "step_time")
    return [
        {name: value for name, value in entry.items() if not name.startswith(left_out)}
        for entry in made.state.log_history
    ]
