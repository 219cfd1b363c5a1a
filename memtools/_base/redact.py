"""Mask secrets in command lines and in the texts of errors before they are written.

    --api-key=abc      --api-key=***          HF_TOKEN=abc       HF_TOKEN=***
    --token abc        --token ***            hf_abcdefgh...     ***
    https://me:abc@h   https://***@h          sk-abcdefgh...     ***

A record is sent to colleagues and attached to reports. A value is masked by the name of its option
or variable, or by its own shape. Where a name may mean either, the value is masked: a word too few
is a smaller loss than a key too many. Tokens that a tokenizer means (--eos-token, --pad-token) are
not secrets and are kept.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

from memtools._base.text import shown

MASK = "***"

# --- names ---

_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+")
# The value of a name whose last word is one of these is secret.
_SECRET = (
    "password", "passwords", "passwd", "passphrase", "pwd", "secret", "secrets", "credential",
    "credentials", "cookie", "auth", "authorization",
)  # fmt: skip
# A key, a pass or several tokens are secret when it is said whose they are.
_OWNERS = frozenset(
    _WORD.findall(
        "access account admin anthropic api app auth aws azure bearer client cohere comet db"
        " deploy encryption gemini google groq hf hub huggingface license login mail master"
        " mistral mysql neptune openai pg postgres private proxy redis refresh secret service"
        " session signing smtp ssh subscription user wandb webhook"
    )
)
# One token is secret unless the word before says that it is a token of a text.
_OF_TEXTS = frozenset(
    _WORD.findall(
        "action add added additional assistant audio begin beginning blank bos boundary byte"
        " char class classification cls concept decoder default delimiter document drop empty"
        " end eod eop eos eot every fim first frame ignore image initializer instance"
        " instruction keep lang language last mask max middle min modifier multi new newline"
        " next null num object of oov pad padding patch per placeholder prefix prompt rare"
        " register response sentence sep separator single sot space speaker special start"
        " state stop style sub subject suffix system task text think thinking timestamp"
        " timestamps tool trigger unk unknown video vision visual word"
    )
)
# An option that begins so is a switch more often than not, and may also have a value.
_SWITCHES = frozenset(
    _WORD.findall(
        "allow ask check disable enable force has hide ignore include is log need needs no"
        " not print prompt require reuse save show skip use validate verbose with without"
    )
)


def _words(name: str) -> list[str]:
    """`--hubToken`, `hub_token` and `HUB.TOKEN` are hub, token."""
    return [word.lower() for word in _WORD.findall(name)]


def _names_a_secret(name: str) -> bool:
    words = _words(name)
    if words[-1:] == ["id"] and words[-2:-1] == ["key"]:  # AWS_ACCESS_KEY_ID
        words.pop()
    if not words or name in ("PWD", "OLDPWD"):
        return False
    *before, last = words
    if last.endswith(_SECRET):
        return True
    for kind in ("tokens", "token", "key", "keys", "pass"):
        if last.endswith(kind):
            owner = last.removesuffix(kind) or (before[-1] if before else "")
            if kind == "tokens" and words == ["tokens"]:
                return True
            if kind == "token":
                return owner not in _OF_TEXTS
            return owner in _OWNERS or owner.endswith("api") or (kind == "pass" and not owner)
    return False


def _is_no_secret(name: str, value: str) -> bool:
    """Whether what follows the name of a secret is evidently something else."""
    if value.strip("\"'").lower() in ("true", "false", "none", "null"):
        return True
    if _words(name) == ["tokens"] and not re.search(r"[A-Za-z_]", value):
        return True  # how many
    is_a_switch = _words(name)[0] in _SWITCHES
    return is_a_switch and _A_FILE_OR_NUMBER.fullmatch(value) is not None


_A_FILE_OR_NUMBER = re.compile(r"\d+(\.\d+)?|(\.{0,2}|~)/[\w./~-]*|[\w./~-]+\.[A-Za-z]\w{0,5}")

# --- where names and values stand ---

_OPTION = re.compile(r"--?[A-Za-z][\w.-]*")
# A value may begin with a dash; one that has large letters and digits is hardly an option.
_VARIABLE = re.compile(r"\w+_(?:key|token|secret|password)", re.I)
_A_VALUE = r"(?:(?=[^\s=]*\d)(?=[^\s=]*[A-Z]))"
_A_SWITCH = re.compile(rf"-[A-Za-z]|--(?!{_A_VALUE}).*", re.S)
_ASSIGNMENT = re.compile(r"((?:--?|\+{1,2})?([A-Za-z_][\w.-]*)=)(.+)", re.S)
_NAME = (
    r"[\w.-]*(?:tokens?|passwords?|passwd|passphrase|pass|pwd|secrets?|credentials?|cookie|auth"
    r"|authorization|keys?|key[-_.]?id)"
)
# A list of values, one in quotes, b'' too, what a call shows (SecretStr('...')), or one word.
_VALUE = (
    r"""(?:(?:[A-Za-z_][\w.]*(?=\())?[\[(][^\])]*[\])]?"""
    r"""|[bru]{0,2}"[^"]*"|[bru]{0,2}'[^']*'|[^\s"',;&)}\]]+)"""
)
_IN_TEXT = re.compile(rf"""(?<![\w.-])({_NAME})(["']?\s*[=:]\s*)({_VALUE})""", re.I)
_AFTER_OPTION = re.compile(
    rf"""(?<![\w.-])(--?{_NAME})(\s+|["']\s*,\s*["'])"""
    rf"""((?!-[A-Za-z](?:\s|$)|(?-i:--(?!{_A_VALUE})))[^\s"']+)""",
    re.I,
)
# Options of several values, and of a value of several words: all of them, up to the next option,
# the next name or the end of what they stand in.
_MANY = r"[\w.-]*(?:tokens|keys|passwords?|passwd|passphrase|secrets)"
_SEVERAL = re.compile(
    rf"""(?<![\w.-])(--?{_MANY}(?=\s|["'])|{_MANY}(?=\s*[=:]))(\s*[=:]\s*|["']\s*,\s*["']|\s+)"""
    r"""((?![-"'[({])[^\s"';\n)\]}]+"""
    r"""(?:(?:[ ,]+|["'],\s*["'])(?!-|[\w.-]+\s?[=:])[^\s"';\n)\]}]+)+)""",
    re.I,
)
# A name with a value behind it and nothing between them, in text.
_BESIDE = re.compile(
    r"""(?<![\w.-])((?:[\w.-]+_)(?:key|token|secret|password))(["']?\s*,?\s+["']?)"""
    r"""((?-i:(?=\S{8})(?=[^\s"']*[a-z])(?=[^\s"']*[A-Z0-9]))[^\s"',]+)""",
    re.I,
)
_LOGIN = re.compile(r"(\blogin\s+\S{1,99}\s+password\s+)\S+")  # of .netrc
_SHORT = re.compile(r"""(?<![\w-])(-p)(?=[^\s"']*\d)(?=[^\s"']*[A-Za-z])[^\s"'=-]{8,}""")
_ENCODED = re.compile(rf"""(?<![\w.-])({_NAME})(%3D)([^\s&'"%]+)""", re.I)
_AUTHORIZATION = re.compile(
    r"""(\bauthorization["']?\s*[=:]\s*["']?)"""
    r"""((?:token|bearer|basic|digest|apikey|negotiate|key)\s+)?[^\s"',]+""",
    re.I,
)

# --- shapes ---

# Keys by which services know their own, and the begin of private keys.
_SHAPES = {
    "Hugging Face": r"hf_[A-Za-z0-9]{20,}|api_org_[A-Za-z0-9]{20,}",
    "OpenAI, Anthropic, OpenRouter": r"sk-(?:proj|ant|or|svcacct|admin)-[\w-]{8,}"
    r"|sk-(?!learn\b)(?=[\w-]{0,64}\d)[\w-]{8,}",
    "Stripe": r"[srp]k_(?:live|test)_\w{10,}",
    "GitHub": r"gh[pousr]_\w{16,}|github_pat_\w{16,}",
    "GitLab": r"gl(?:pat|dt|rt|cbt|ptt|oas)-[\w-]{16,}",
    "Slack": r"xox[abeprs]-[\w-]{8,}|xapp-[\w-]{16,}",
    "AWS": r"(?:AKIA|ASIA)[A-Z0-9]{12,}",
    "Google": r"AIza[\w-]{30,}|ya29\.[\w-]{16,}",
    "NVIDIA, Groq, xAI, Replicate": r"nvapi-[\w-]{16,}|gsk_[A-Za-z0-9]{16,}|xai-[\w-]{20,}"
    r"|r8_[A-Za-z0-9]{30,}",
    "Weights & Biases": r"wandb_v1_\w{16,}",
    "PyPI, npm, Docker": r"pypi-[\w-]{16,}|npm_[A-Za-z0-9]{20,}|dckr_pat_[\w-]{16,}",
    "Databricks, Vault": r"dapi[0-9a-f]{32}|hv[sbr]\.[\w-]{20,}",
    "SendGrid, DigitalOcean": r"SG\.[\w-]{16,}\.[\w-]{16,}|do[opr]_v1_[0-9a-f]{32,}",
    "LangSmith, Perplexity, webhooks": r"lsv2_(?:pt|sk)_\w{16,}|pplx-\w{16,}|whsec_[\w+/=-]{16,}",
    "Telegram": r"\d{8,10}:AA[\w-]{30,}",
    "JSON web tokens": r"eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*",
}
_KEY = re.compile(rf"\b(?:{'|'.join(_SHAPES.values())})")
_PRIVATE = re.compile(
    r"(-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----)(?!\*\*\*).*?(?:-----END [A-Z ]{0,40}-----|$)", re.S
)
_USER = re.compile(
    r"([A-Za-z][\w+.-]{0,30}://)(?:[^\s/'\"]+@|(?<!http://)(?<!https://)[^\s/'\"@:]*:[^\s'\"@]{1,99}@)"
)
_QUERY = re.compile(
    r"([?&](?:sig|signature|key|x-(?:amz|goog)-(?:signature|credential|security-token))=)[^&\s'\"]+",
    re.I,
)
_WEBHOOK = re.compile(
    r"(https://(?:hooks\.slack\.com|discord(?:app)?\.com/api/webhooks|[\w.-]+\.webhook\.office\.com)/)"
    r"[^\s'\"]+"
)
_HEADER = re.compile(
    r"\b(authorization:\s*token\s+|bearer\s+|basic\s+(?=[\w+/-]*[\d=]))[\w.~+/=-]{8,}", re.I
)


# A record has room for far less; a value that a program looked up may have any length.
_MOST = 4096


def redacted(text: str) -> str:
    """The text with `***` in place of what looks like a secret; of a text of more than 4,096
    characters the whole words at its beginning."""
    if len(text) > _MOST:
        text = f"{text[:_MOST].rpartition(' ')[0] or text[:_MOST]} ..."
    text = _USER.sub(rf"\1{MASK}@", text)
    text = _QUERY.sub(rf"\1{MASK}", text)
    text = _WEBHOOK.sub(rf"\1{MASK}", text)
    text = _PRIVATE.sub(rf"\1{MASK}", text)
    text = _AUTHORIZATION.sub(rf"\1{MASK}", text)
    text = _HEADER.sub(rf"\1{MASK}", text)
    for place in (_SEVERAL, _IN_TEXT, _AFTER_OPTION, _BESIDE, _ENCODED):
        text = place.sub(_masked, text)
    text = _LOGIN.sub(rf"\1{MASK}", _SHORT.sub(rf"\1{MASK}", text))
    return _KEY.sub(MASK, text)


def _masked(found: re.Match[str]) -> str:
    name, between, value = found.groups()
    if not _names_a_secret(name) or _is_no_secret(name, value):
        return found[0]
    return f"{name}{between}{MASK}"


def redacted_command(arguments: Iterable[str]) -> tuple[str, ...]:
    """The arguments of a command, the values of options that name a secret masked."""
    shown: list[str] = []
    option: str | None = None  # the one before, where it names a secret
    for argument in arguments:
        if option is not None and not _A_SWITCH.fullmatch(argument):
            shown.append(redacted(argument) if _is_no_secret(option, argument) else MASK)
            if not option.lower().endswith("s"):  # --tokens has several
                option = None
            continue
        shown.append(_redacted_argument(argument))
        names_one = _OPTION.fullmatch(argument) or _VARIABLE.fullmatch(argument)
        option = argument if names_one and _names_a_secret(argument) else None
    return tuple(shown)


def _redacted_argument(argument: str) -> str:
    assigned = _ASSIGNMENT.fullmatch(argument)
    if assigned and _names_a_secret(assigned[2]) and not _is_no_secret(assigned[2], assigned[3]):
        return f"{assigned[1]}{MASK}"
    return redacted(argument)


@functools.lru_cache(maxsize=512)
def harmless(text: str) -> str:
    """A name of the program as memtools shows it anywhere: secrets masked, and what could control a
    terminal or a page escaped. Takes 0.1 ms for each of the newest 512 names, once."""
    return shown(redacted(text)) if text else text
