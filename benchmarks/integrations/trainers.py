"""memtools.use(trainer) beside the plain trainer: losses, memory and processor time.

    python -m benchmarks.integrations.trainers    # about 10 minutes; writes results/trainers.json

Every run is a process of its own, with the same seed and data: four updates of a batch of 32 rows
by a small llama with a vocabulary of 8,192. `plain` and `use` have no limit. `60 %` has RLIMIT_DATA
at what the process has before training, and 60 % of the resident memory by which the plain training
grows. The rows of GRPO and RLOO are 4 prompts of 100 words, each answered 8 times with 24 tokens.

After these come the sampling of GRPO alone, a prompt of 800 words answered 8 times; and the
processor time of 400 steps of Trainer, of which the first 100 have most looks of the leak test.
"""

from __future__ import annotations

import ctypes
import functools
import json
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.kit.harness import Json, arguments, environment, table
from benchmarks.kit.limits import Limit, finish, number_limit

KINDS = ("Trainer", "Trainer, a mean", "SFT", "DPO", "GRPO", "RLOO", "Lightning")
SHARE = 0.6  # of what the plain training grows by
SAME = 1e-6  # Losses may differ by this share.
WORDS, LONGEST = 8192, 120
FIRST = 100  # steps
ANSWERS = 16, 64  # tokens; the limits are for the first
SECONDS = 400


def main() -> None:
    if sys.argv[1:2] == ["--sampling"]:
        print(json.dumps(sampled(sys.argv[2], int(sys.argv[3]))))
        return
    if sys.argv[1:2] == ["--steps"]:
        print(json.dumps(stepped(sys.argv[2])))
        return
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(trained(*sys.argv[2:5])))
        return
    options = arguments(__doc__).parse_args()
    rows = [measure(kind) for kind in KINDS if kind.startswith(options.only or "")]
    print(
        table(
            (
                "trainer",
                "grows MiB",
                "60 % plain",
                "with use",
                "off",
                "cpu s",
                "use",
                "60 %",
            ),
            (
                (
                    row["kind"],
                    f"{row['plain']['grown'] / 2**20:,.0f}",
                    row["plain 60 %"]["ended"],
                    row["use 60 %"]["ended"],
                    f"{max(off(row, 'use'), off(row, 'use 60 %')):.1e}",
                    *(f"{row[name]['cpu']:.1f}" for name in ("plain", "use", "use 60 %")),
                )
                for row in rows
            ),
        )
    )
    sampling = [measure_sampling(answer) for answer in ANSWERS]
    for found in sampling:
        print(
            f"GRPO samples 8 answers of {found['answer']} tokens to a prompt of 800 words: memory "
            f"{found['memory']:.2f} x of plain, processor time {found['cpu']:.2f} x (min; median "
            f"{found['cpu_median']:.2f}), same rewards: {found['same']}"
        )
    steps = measure_steps()
    print(f"the first {FIRST} steps take {steps['first']:.1f} s more of the processor with use")
    facts = environment(options.threads)
    figures = {"rows": rows, "sampling": sampling, "steps": steps}
    limits = limits_of(rows) + limits_of_sampling(sampling[0]) + limits_of_steps(steps)
    finish("trainers", options, facts, figures, limits)


def limits_of(rows: list[Json]) -> list[Limit]:
    if not rows:
        return []
    ended = sum(row["use 60 %"]["ended"] != "finished" for row in rows)
    worst = max(off(row, name) for row in rows for name in ("use", "use 60 %"))
    return [
        number_limit(f"trainings of {len(KINDS)} that do not finish at 60 %", 0, "", ended, ended),
        number_limit("losses and norms of gradients beside plain", SAME, "off", worst, worst),
    ]


def limits_of_sampling(found: Json) -> list[Limit]:
    return [
        number_limit("memory of sampling beside plain", 0.4, "x", found["memory"], found["memory"]),
        number_limit(
            "processor time of sampling beside plain", 0.35, "x", found["cpu"], found["cpu_median"]
        ),
    ]


def limits_of_steps(found: Json) -> list[Limit]:
    return [
        number_limit(
            f"processor time of the steps after the first {FIRST}, {way} beside plain",
            most, "x", min(found[way]), statistics.median(found[way]),
        )
        for way, most in (("use", 1.02), ("callback", 1.01))
    ]  # fmt: skip


def measure_steps() -> Json:
    """The steps of a training whose batches fit, three ways in turns."""
    runs: dict[str, list[Json]] = {"plain": [], "use": [], "callback": []}
    for _ in range(3):
        for way, found in runs.items():
            found.append(child("--steps", way))
    plain = runs["plain"]
    ratios: dict[str, Any] = {
        way: [a["later"] / b["later"] for a, b in zip(runs[way], plain, strict=True)]
        for way in ("use", "callback")
    }
    pairs = zip(runs["use"], plain, strict=True)
    return {"runs": runs, **ratios, "first": min(a["first"] - b["first"] for a, b in pairs)}


def measure_sampling(answer: int) -> Json:
    """The sampling of GRPO, plain and with use, in turns."""
    runs: dict[str, list[Json]] = {"plain": [], "use": []}
    for _ in range(3):
        for way, found in runs.items():
            found.append(child("--sampling", way, str(answer)))
    plain, ours = runs["plain"], runs["use"]
    ratios = [a["cpu"] / b["cpu"] for a, b in zip(ours, plain, strict=True)]
    return {
        "answer": answer,
        "runs": runs,
        "memory": max(a["grown"] / b["grown"] for a, b in zip(ours, plain, strict=True)),
        "cpu": min(ratios),
        "cpu_median": statistics.median(ratios),
        "same": all(a["rewards"] == plain[0]["rewards"] for a in ours),
    }


def measure(kind: str) -> Json:
    """The four runs of one trainer."""
    plain = run(kind, "plain", 0)
    limit = int(SHARE * plain["grown"])
    return {
        "kind": kind, "plain": plain, "use": run(kind, "use", 0),
        "plain 60 %": run(kind, "plain", limit), "use 60 %": run(kind, "use", limit),
    }  # fmt: skip


def off(row: Json, name: str) -> float:
    """The largest difference of a loss or a norm of gradients from the plain one, of what is
    larger, that or 1; inf if a run did not finish."""
    ours, plain = row[name]["logged"], row["plain"]["logged"]
    if len(ours) != len(plain):
        return float("inf")
    pairs = list(zip(ours, plain, strict=True))
    return max(abs(float(a) - float(b)) / max(1.0, abs(float(b))) for a, b in pairs)


def run(kind: str, way: str, limit: int) -> Json:
    """One training in a process of its own."""
    return child("--child", kind, way, str(limit))


def child(*words: str) -> Json:
    """What this program prints with these arguments."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.integrations.trainers", *words],
        capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr[-2000:]}")
    found: Json = json.loads(done.stdout.splitlines()[-1])
    return found


def trained(kind: str, way: str, limit: str) -> Json:
    """Train in this process, and return its losses, growth and times."""
    warnings.simplefilter("ignore")
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        run: Callable[[], object]
        if kind == "Lightning":
            trainer, run, logged = of_lightning()
        else:
            trainer = made(kind, Path(folder))
            trainer.remove_callback(transformers.PrinterCallback)
            run, logged = trainer.train, trainer.state.log_history
        if way == "use":
            import memtools

            memtools.use(trainer)
        before = memory("VmRSS")
        if int(limit):
            most = memory("VmData") + int(limit)
            resource.setrlimit(resource.RLIMIT_DATA, (most, resource.RLIM_INFINITY))
        began, ended = time.process_time(), "finished"
        try:
            run()
        except RuntimeError as error:
            ended = "out of memory" if "allocate memory" in str(error) else str(error)
    return {
        "logged": [
            float(entry[name])
            for entry in logged
            for name in ("loss", "grad_norm")
            if name in entry
        ],
        "ended": ended,
        "grown": memory("VmHWM") - before,  # use() resets it in each phase
        "cpu": time.process_time() - began,
    }


def sampled(way: str, answer: int) -> Json:
    """Train GRPO in this process, and return what its sampling costs after the first update."""
    warnings.simplefilter("ignore")
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    costs: list[tuple[int, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = made("GRPO", Path(folder), words=800, prompts=1, answer=answer)
        trainer.remove_callback(transformers.PrinterCallback)
        if way == "use":
            import memtools

            memtools.use(trainer)
        sample = trainer._generate_single_turn

        def measured(*args: Any, **kwargs: Any) -> Any:
            ctypes.CDLL(None).malloc_trim(0)  # What is idle would hide the growth.
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew.
            before, began = memory("VmRSS"), time.process_time()
            made = sample(*args, **kwargs)
            costs.append((memory("VmHWM") - before, time.process_time() - began))
            return made

        trainer._generate_single_turn = measured
        trainer.train()
    later = costs[1:]
    return {
        "grown": max(grown for grown, _ in later),
        "cpu": sum(cpu for _, cpu in later) / len(later),
        "rewards": [x["reward"] for x in trainer.state.log_history if "reward" in x],
    }


def stepped(way: str) -> Json:
    """Train in this process, and return the processor time of the first steps and of the others."""
    warnings.simplefilter("ignore")
    import torch
    import transformers

    import memtools
    from memtools.integrations.transformers import MemoryCallback

    times: list[float] = []

    class Clock(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            times.append(time.process_time())

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        trainer = made("Trainer", Path(folder), steps=400, rows_of_batch=4)
        trainer.remove_callback(transformers.PrinterCallback)
        if way == "use":
            memtools.use(trainer)
        elif way == "callback":
            MemoryCallback().add_to(trainer)
        trainer.add_callback(Clock())
        began = time.process_time()
        trainer.train()
    return {"first": times[FIRST - 1] - began, "later": times[-1] - times[FIRST - 1]}


def memory(name: str) -> int:
    """A value of /proc/self/status in bytes."""
    match = re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert match is not None
    return 1024 * int(match[1])


def made(
    kind: str,
    folder: Path,
    words: int = 100,
    prompts: int = 4,
    answer: int = 24,
    steps: int = 4,
    rows_of_batch: int = 32,
) -> Any:
    """A trainer with a model of its own. `words`, `prompts` and `answer` are those of GRPO."""
    import datasets
    import torch
    from transformers import LlamaForCausalLM, Trainer, TrainingArguments

    datasets.disable_progress_bars()
    vocabulary = WORDS // 4 if kind == "DPO" else WORDS
    llama(vocabulary).save_pretrained(folder / "model")  # TRL reads a second one from there.
    model = LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    draw = random.Random(1)
    options = {
        "output_dir": str(folder / "out"), "max_steps": steps, "logging_steps": 1, "use_cpu": True,
        "save_strategy": "no", "report_to": [], "disable_tqdm": True, "seed": 1, "optim": "sgd",
        "learning_rate": 0.1, "per_device_train_batch_size": rows_of_batch,
    }  # fmt: skip
    if kind.startswith("Trainer"):
        rows = [row(draw, vocabulary) for _ in range(64)]
        net = model if kind == "Trainer" else mean_of(model)
        return Trainer(net, TrainingArguments(**options), train_dataset=rows)
    if kind in ("GRPO", "RLOO"):
        options |= {
            "num_generations": 8, "max_completion_length": answer,
            "per_device_train_batch_size": 8 * prompts,
        }  # fmt: skip
    return of_trl(kind, model, options, draw, vocabulary, words)


def of_lightning() -> tuple[Any, Callable[[], object], list[Json]]:
    """A Trainer of Lightning, how it trains, and the losses and norms that this adds to a list."""
    import lightning
    import torch
    from torch.utils.data import DataLoader, default_collate

    net = llama(WORDS)
    logged: list[Json] = []

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, index: int) -> Any:
            loss = self.net(**batch).loss
            self.log("loss", loss)
            return loss

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
            logged.append({"grad_norm": float(torch.stack(norms).norm())})

        def on_train_batch_end(self, *args: Any) -> None:
            logged[-1]["loss"] = float(self.trainer.callback_metrics["loss"])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    draw = random.Random(1)
    rows: Any = [row(draw, WORDS) for _ in range(128)]
    data: Any = DataLoader(rows, 32, collate_fn=default_collate)
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    return trainer, functools.partial(trainer.fit, Module(), data), logged


def llama(vocabulary: int) -> Any:
    """A small model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=4, max_position_embeddings=1024, pad_token_id=0, bos_token_id=1,
        eos_token_id=1,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def row(draw: random.Random, vocabulary: int) -> dict[str, Any]:
    import torch

    ids = [draw.randrange(3, vocabulary) for _ in range(draw.randrange(30, LONGEST))]
    left = LONGEST - len(ids)
    return {
        "input_ids": torch.tensor(ids + [0] * left),
        "labels": torch.tensor(ids + [-100] * left),
        "attention_mask": torch.tensor([1] * len(ids) + [0] * left),
    }


def mean_of(model: Any) -> Any:
    """A model whose forward() takes no num_items_in_batch, so that its loss is a mean."""
    import torch

    class Mean(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, input_ids: Any, labels: Any, attention_mask: Any) -> Any:
            return self.inner(input_ids=input_ids, labels=labels, attention_mask=attention_mask)

    return Mean()


def of_trl(
    kind: str, model: Any, options: Json, draw: random.Random, vocabulary: int, words_of_prompt: int
) -> Any:
    import datasets
    import trl
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {name: i for i, name in enumerate(("<pad>", "<eos>", "<unk>"))}
    words |= {f"w{i}": i + 3 for i in range(vocabulary - 3)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()

    def text(least: int, most: int) -> str:
        count = draw.randrange(least, most)
        return " ".join(f"w{draw.randrange(vocabulary - 3)}" for _ in range(count))

    def reward(completions: list[str], **others: Any) -> list[float]:
        return [sum(w[-1:] in "02468" for w in c.split()) / 10 for c in completions]

    more: Json = {}
    if kind == "SFT":
        rows, options["loss_type"] = [{"text": text(30, LONGEST)} for _ in range(64)], "nll"
    elif kind == "DPO":
        rows = [
            {"prompt": text(20, 21), "chosen": " " + text(30, 100), "rejected": " " + text(30, 100)}
            for _ in range(64)
        ]
    else:
        rows = [{"prompt": text(words_of_prompt, words_of_prompt + 1)} for _ in range(64)]
        more["reward_funcs"] = reward
    options |= {"bf16": False, "gradient_checkpointing": False}
    return getattr(trl, f"{kind}Trainer")(
        model,
        args=getattr(trl, f"{kind}Config")(**options),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
        ),
        **more,
    )


if __name__ == "__main__":
    main()
