"""Training data that every Python has: the standard library's docstrings, and arithmetic."""

from __future__ import annotations

import importlib
import inspect
import random
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

MODULES = (  # whole words, kept as text: a list of them would fill a page
    "argparse ast asyncio base64 bisect calendar collections concurrent.futures configparser "
    "contextlib copy csv datetime decimal difflib email.message fractions functools glob gzip "
    "hashlib heapq html http.client imaplib inspect io ipaddress json logging mailbox math "
    "multiprocessing.pool operator os pathlib pickle pprint random re sched shelve shlex shutil "
    "smtplib socket sqlite3 statistics string struct subprocess tarfile tempfile textwrap "
    "threading tokenize traceback types unittest unittest.mock urllib.parse urllib.request uuid "
    "wave weakref xml.dom.minidom xml.etree.ElementTree zipfile"
)

Message = dict[str, str]
Row = dict[str, Any]


class Documented(NamedTuple):
    """A function or class of the standard library."""

    name: str
    signature: str
    docstring: str

    @property
    def question(self) -> list[Message]:
        """The prompt that asks for its docstring."""
        text = f"Write the docstring of this Python function.\n\n{self.name}{self.signature}"
        return [{"role": "user", "content": text}]

    @property
    def answer(self) -> list[Message]:
        """The completion that is its docstring."""
        return [{"role": "assistant", "content": self.docstring}]


def documented_functions() -> list[Documented]:
    """Return the public functions and classes of MODULES that have a docstring, longest first."""
    found = {entry.name: entry for module in MODULES.split() for entry in _of_module(module)}
    return sorted(found.values(), key=lambda entry: (-len(entry.docstring), entry.name))


def _of_module(module_name: str) -> Iterator[Documented]:
    module = importlib.import_module(module_name)
    for name, value in vars(module).items():
        public = not name.startswith("_") and callable(value)
        if not public or _home(value) != module_name:
            continue
        yield from _documented(f"{module_name}.{name}", value)
        if inspect.isclass(value):
            for method_name, method in vars(value).items():
                if not method_name.startswith("_") and inspect.isfunction(method):
                    yield from _documented(f"{module_name}.{name}.{method_name}", method)


def _home(value: object) -> str | None:
    module = getattr(value, "__module__", None)  # some callables in modules have none
    return module if isinstance(module, str) else None


def _documented(name: str, value: Any) -> Iterator[Documented]:
    docstring = inspect.cleandoc(value.__doc__) if isinstance(value.__doc__, str) else ""
    if len(docstring) < 80:
        return
    try:
        signature = str(inspect.signature(value))
    except (TypeError, ValueError):  # some built-in ones have none
        return
    if " at 0x" not in signature:  # the address of a default value differs from run to run
        yield Documented(name, signature, docstring)


def sft_rows(count: int, seed: int) -> list[Row]:
    """Return `count` rows: prompt, a signature; completion, its docstring; long ones, shuffled."""
    chosen = _take(documented_functions(), count)
    random.Random(seed).shuffle(chosen)
    return [{"prompt": entry.question, "completion": entry.answer} for entry in chosen]


def dpo_rows(count: int, seed: int) -> list[Row]:
    """Return `count` rows: chosen is the docstring of the function, rejected that of another one.

    The two are neighbours in length, so that the pair cannot be told apart by length.
    """
    entries = _take(documented_functions(), 2 * count)
    pairs = list(zip(entries[0::2], entries[1::2], strict=True))
    random.Random(seed).shuffle(pairs)
    return [
        {"prompt": mine.question, "chosen": mine.answer, "rejected": other.answer}
        for mine, other in pairs
    ]


def _take(entries: list[Documented], count: int) -> list[Documented]:
    if count > len(entries):
        raise ValueError(
            f"{count} docstrings are needed, the standard library has {len(entries)}: lower --steps"
        )
    return entries[:count]


def grpo_rows(count: int, seed: int) -> list[Row]:
    """Return `count` rows: prompt, a sum told as a story; answer, the number."""
    generator = random.Random(seed)
    rows = []
    for _ in range(count):
        stock, delivery = generator.randint(10, 40), generator.randint(2, 40)
        sold = generator.randint(2, stock)
        text = (
            f"A shop has {stock} apples. It sells {sold} and then gets {delivery} more. "
            "How many apples has it now? Explain in two sentences and end with the number."
        )
        answer = stock - sold + delivery
        rows.append({"prompt": [{"role": "user", "content": text}], "answer": answer})
    return rows


def arithmetic_reward(
    completions: list[list[Message]], answer: list[int], **_: object
) -> list[float]:
    """Reward the last number of each completion: 1 if it is right, 1 / (1 + error) otherwise.

    A completion without a number gets 0. In the form that TRL calls reward functions.
    """
    rewards = []
    for messages, right in zip(completions, answer, strict=True):
        numbers = re.findall(r"-?\d+", messages[-1]["content"].replace(",", ""))
        # More than 18 digits would be a number that float cannot hold exactly; it is as wrong.
        error = abs(int(numbers[-1][:18]) - right) if numbers else None
        rewards.append(0.0 if error is None else 1.0 / (1.0 + error))
    return rewards
