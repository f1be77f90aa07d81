"""The packing benchmark on a tiny model: what it packs, counts and prints."""

import io
import json
from pathlib import Path

import pytest

from lowpeak_bench.packing import documents, main, total_tokens

# Raised by TRL and transformers themselves; the last by TRL where packed rows meet sdpa.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Padding-free training is enabled:UserWarning"),
]


def test_documents_have_log_uniform_lengths() -> None:
    lengths = [len(row) for row in documents(2000, 64, 8192, 500)["input_ids"]]
    assert min(lengths) >= 64
    assert max(lengths) <= 8192
    # half of them lie below the geometric mean of the bounds, 724
    assert sum(length < 724 for length in lengths) == pytest.approx(1000, abs=100)


def test_both_sides_train_on_the_same_tokens(tmp_path: Path) -> None:
    stream, target = io.StringIO(), tmp_path / "packing.json"
    small = ["--config", "tiny", "--documents", "60", "--shortest", "4", "--max-length", "32"]
    run = ["--rows", "2", "--repeats", "1", "--device", "cpu", "--dtype", "float32"]
    assert main([*small, *run, "--json", str(target)], stream) == 0
    document = json.loads(target.read_text())
    stock, ours = document["results"]
    assert document["document_tokens"] == total_tokens(documents(60, 4, 32, 500))
    for one in (stock, ours):
        assert one["failure"] is None
        tokens = one["fill"] * one["packed_rows"] * 32
        assert tokens == pytest.approx(document["document_tokens"])
        assert one["tokens_per_second"] == pytest.approx(
            tokens / one["packed_rows"] * 2 / one["seconds"]
        )
    assert ours["packed_rows"] == stock["packed_rows"]  # one window of TRL's holds all
    assert ours["losses"][0] == pytest.approx(stock["losses"][0], abs=1e-4)
    assert ours["ratio_to_trl"] == pytest.approx(
        ours["tokens_per_second"] / stock["tokens_per_second"]
    )
    assert "lowpeak" in stream.getvalue().splitlines()[-1]
