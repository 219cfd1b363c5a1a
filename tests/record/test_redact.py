"""Secrets of command lines and error texts are masked, and nothing else is."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest

from memtools._base.redact import redacted, redacted_command

# A command line as a shell takes it, and what is shown of it, word for word.
MASKED = {
    # Options and their values.
    "train.py --api-key=abc": "train.py --api-key=***",
    "train.py --api_key=abc --lr 1": "train.py --api_key=*** --lr 1",
    "--token abc x": "--token *** x",
    "-password 'a b c'": "-password ***",
    "--db.password='my own words'": "--db.password=***",
    "--clientSecret=abc --apiKey x": "--clientSecret=*** --apiKey ***",
    "train.py --hub_token abc data": "train.py --hub_token *** data",
    "--hub-token=abc": "--hub-token=***",
    "train.py --wandb-key 0123abc --wandb_key=0123abc": (
        "train.py --wandb-key *** --wandb_key=***"
    ),
    "--openai-key abc --hf-key=abc": "--openai-key *** --hf-key=***",
    "--session-token abc --bot_token abc --user-token abc": (
        "--session-token *** --bot_token *** --user-token ***"
    ),
    "--api-tokens abc,def --passwords abc": "--api-tokens *** --passwords ***",
    "--db-pass abc --pass abc --smtp_pass=abc": "--db-pass *** --pass *** --smtp_pass=***",
    "wandb.api_key=abc +hub_token=abc ++a.secret='x y'": (
        "wandb.api_key=*** +hub_token=*** ++a.secret=***"
    ),
    "--password secret.txt": "--password ***",  # an option that always has a value
    "--use_auth_token abcdef": "--use_auth_token ***",  # may be a switch, or not
    "--use-api-token --hub-token abc": "--use-api-token --hub-token ***",
    "--hftoken abc --mytoken=abc": "--hftoken *** --mytoken=***",
    "--token -abcdef": "--token ***",
    # Variables of the environment.
    "env HF_TOKEN=abc x": "env HF_TOKEN=*** x",
    "AWS_SECRET_ACCESS_KEY=abc AWS_ACCESS_KEY_ID=abc AWS_SESSION_TOKEN=abc": (
        "AWS_SECRET_ACCESS_KEY=*** AWS_ACCESS_KEY_ID=*** AWS_SESSION_TOKEN=***"
    ),
    "WANDB_API_KEY=abc OPENAI_API_KEY=abc": "WANDB_API_KEY=*** OPENAI_API_KEY=***",
    "sbatch --export=ALL,HF_TOKEN=abc,X=1 --env=HF_TOKEN=abc -eHF_TOKEN=abc": (
        "sbatch --export=ALL,HF_TOKEN=***,X=1 --env=HF_TOKEN=*** -eHF_TOKEN=***"
    ),
    # Keys by their shape, wherever they stand.
    "login hf_abcDEF0123456789xyzXYZ": "login ***",
    "--model hf_abcDEF0123456789xyzXYZ": "--model ***",
    "'key is sk-proj-abcdef123456.'": "'key is ***.'",
    "sk-ant-api03-abcdefgh ghp_abcdefgh12345678 AKIAABCDEFGH12345678": "*** *** ***",
    "nvapi-abcdefgh01234567890 gsk_abcdefgh01234567890 wandb_v1_abcdefgh01234567890": (
        "*** *** ***"
    ),
    "sk_live_51Habcdefghijklmnop hvs.CAESIJabcdefghijklmnop12 ya29.a0AfH6SMBabcdefghijk": (
        "*** *** ***"
    ),
    "npm_abcdefghijklmnopqrstuvwxyz dapi0123456789abcdef0123456789abcdef": "*** ***",
    # Addresses.
    "https://me:abc@host/x postgres://u:p@db/x redis://:pw@h": (
        "https://***@host/x postgres://***@db/x redis://***@h"
    ),
    "'https://host/x?n=1&token=abc&m=2'": "'https://host/x?n=1&token=***&m=2'",
    "'https://a.blob.host/x?sv=1&sig=ab%2Fc'": "'https://a.blob.host/x?sv=1&sig=***'",
    "'https://s3/x?X-Amz-Signature=abc&X-Amz-Date=1'": (
        "'https://s3/x?X-Amz-Signature=***&X-Amz-Date=1'"
    ),
    "https://hooks.slack.com/services/T0/B0/abc": "https://hooks.slack.com/***",
    # Programs, a shell's lines, headers, JSON.
    """-c "login(token='abc', n=1)" """: "-c 'login(token=***, n=1)'",
    "sh -c 'x --token abc -v'": "sh -c 'x --token *** -v'",
    "-H 'Authorization: Bearer abcdef123'": "-H 'Authorization: ***'",
    "-H 'Authorization: token abcdef123'": "-H 'Authorization: ***'",
    "--tokens abc def --lr 1": "--tokens *** *** --lr 1",
    "--token --ABC123": "--token ***",
    "aws_secret_access_key wJalrXUtnFEMI": "aws_secret_access_key ***",
    "'machine h login me password abc'": "'machine h login me password ***'",
    "mysql -pAbcdef123": "mysql -p***",
    """'{"api_keys": ["abc", "def"], "n": [1]}'""": """'{"api_keys": ***, "n": [1]}'""",
    "'api_keys=[abc,def]'": "'api_keys=***'",
    "postgres://u:a/b@h/db": "postgres://***@h/db",
    "'https://h/?to=x%3Ftoken%3Dabc&n=1'": "'https://h/?to=x%3Ftoken%3D***&n=1'",
    "'host=h password=a b c dbname=x'": "'host=h password=*** dbname=x'",
    "sk_live_51Habcdefghijklmnop npm_abcdefghijklmnopqrstuvwxyz0123456789": "*** ***",
    "dapi0123456789abcdef0123456789abcdef hvs.CAESIJabcdefghijklmnop1234567890": "*** ***",
    "xai-abcdefghijklmnopqrstuvwxyz1234567890 ya29.a0AfH6SMBabcdefghijklmnop": "*** ***",
    "whsec_abcdefghijklmnopqrstuv pplx-abcdefghijklmnop123 lsv2_pt_0123456789abcdef": "*** *** ***",
    """'Client(api_key=SecretStr("abc"), n=3)'""": "'Client(api_key=***, n=3)'",
    """'connect(password=b"abc")'""": "'connect(password=***)'",
    "dop_v1_0123456789abcdef0123456789abcdef 123456789:AAHdqTcvCH1vGWJxfSeofSAs0K5PALDsaw": (
        "*** ***"
    ),
    "SG.abcdefghijklmnopqrstuv.abcdefghijklmnopqrstuvwxyz sk-proj-abcDEFghiJKL": "*** ***",
    "'-----BEGIN OPENSSH PRIVATE KEY-----\nb3Blbn\n-----END OPENSSH PRIVATE KEY----- x'": (
        "'-----BEGIN OPENSSH PRIVATE KEY-----*** x'"
    ),
    """'{"api_key": "abc", "n": 1}'""": """'{"api_key": ***, "n": 1}'""",
}

KEPT = [
    "/usr/bin/python3 train.py --lr 3e-4 --max-tokens 512 --max_new_tokens=512",
    "--tokenizer gpt2 --num_tokens=5 --key x --tokens-per-step=1 --token-embedding 512",
    "--eos-token '</s>' --bos_token '<s>' --pad-token='[PAD]' --unk_token x --mask-token '[MASK]'",
    "--cls_token=x --sep-token x --image_token '<image>' --stop-token END --additional_token x",
    "--placeholder_token '<cat>' --initializer_token cat --modifier_token '<new1>'",
    "--decoder-start-token x --next-token x --padToken x --eostoken x --max_token 5",
    "--eos_token_id 2 --pad_token_id=0 --token-file a.txt --password-file=/run/x --token_type ids",
    "torchrun --nproc-per-node=2 -m pkg.train --out=/data/runs/3",
    "-c 'for step in range(9): pass'",
    "-c \"tokenizer.add(pad_token='<pad>', eos_token='</s>')\"",
    "sh -c 'train --eos-token x --pad_token=y'",
    "hf_finetune.py --model hf_internal_testing/tiny ./hf_checkpoints/x",
    "--project sk-learn-baseline-2 --run task-12345678901 --revision 0123456789abcdef0123456789",
    "https://host/path@2 user@host:/path a=b ß=ü ''",
    "--image-key pixels --sort_key=x --metric-key loss --hotkey x --monkey x --first-pass 1",
    "PWD=/home/me OLDPWD=/ SSH_AUTH_SOCK=/run/x",
    # Switches, and options that are left out.
    "--token --lr 1",
    "--token -v x",
    "--use-api-token --lr 0.1",
    "--verbose-token file.txt --use-auth-token ./data --no-auth 3 --use_auth_token True",
    "--hub_token None --push",
    "--tokens 512 --keys a b --sort-keys a b",
    "-p8080:80 -px86 --port 8080 -pretrained",
    "'login as me, password is asked for'",
    "'http://host:8080/path/@user' 'xai-small hvs.x npm_config_x sk_learn SG.x'",
]


@pytest.mark.parametrize("line", MASKED)
def test_what_is_secret_is_masked(line: str) -> None:
    assert redacted_command(shlex.split(line)) == tuple(shlex.split(MASKED[line], posix=True))


@pytest.mark.parametrize("line", KEPT)
def test_what_is_not_secret_is_kept(line: str) -> None:
    assert redacted_command(shlex.split(line)) == tuple(shlex.split(line))


def test_the_text_of_an_error() -> None:
    text = "401 for https://u:pw@hub/x with token=abc; see hf_abcdefgh1234abcdefgh"
    assert redacted(text) == "401 for https://***@hub/x with token=***; see ***"
    assert redacted(redacted(text)) == redacted(text)
    for kept in (
        "CUDA out of memory. Tried to allocate 2.00 GiB",
        "multi-token prediction failed",
        "next-token loss is nan",
        "only basic indexing is supported",
        "pad_token: None, eos_token='</s>'",
        "expected 512 tokens, got tokens: 512, 1024",
        "the key of sort_key is not there; tokens and keys are counted",
        "KeyError: 'input_ids'; hf_token is not set",
    ):
        assert redacted(kept) == kept


@pytest.mark.parametrize("line", [*MASKED, *KEPT])
def test_what_is_masked_stays_as_it_is(line: str) -> None:
    once = redacted_command(shlex.split(line))
    assert redacted_command(once) == once


# A word of a protein, an image or a key that was looked up; each is searched many times over by an
# expression that begins anew at each of its characters.
LONG = ["A", "a.-", "sk-", "key", "--key ", "a=", "a://", "token=", "eyJ-", "bearer ", "_", "Tt"]


@pytest.mark.parametrize("part", LONG)
def test_a_text_of_any_length_is_done_at_once(part):
    code = "import sys\nfrom memtools._base.redact import redacted, redacted_command\n"
    code += "text = sys.argv[1] * 1_000_000\n"
    code += "print(len(redacted(text)), *map(len, redacted_command(['--seq', text, text])))"
    done = subprocess.run(
        [sys.executable, "-c", code, part], capture_output=True, text=True, timeout=60, check=True
    )
    assert max(map(int, done.stdout.split())) < 5000


def test_a_key_in_a_long_text_is_masked():
    assert redacted("token=abc " + "x" * 10_000) == "token=*** ..."
    assert "hf_" not in redacted("x " * 2043 + "hf_" + "a" * 40)
