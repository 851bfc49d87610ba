"""The policy and the problems of ``scripts/quickstart.sh --policy smollm2``."""

import re
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import dequantize, quantize
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from megatron_dppo.rewards.math.verdict import math_verdict
from tools.smollm2 import model, problems

Q4 = GGMLQuantizationType.Q4_1


def find_numbers(text: str) -> list[int]:
    return sorted(map(int, re.findall(r"\d+", text)))


def read_question(row: dict) -> str:
    return row["prompt"][-1]["content"]


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_labels_are_right(split: str) -> None:
    """Problems of one step have the numbers' own result; of several, the result of the worked
    answer."""
    results = {
        "add": int.__add__,
        "subtract": int.__sub__,
        "multiply": int.__mul__,
        "divide": int.__floordiv__,
    }
    for row in problems.generate_problems(split, 400, set()):
        small, large = find_numbers(read_question(row))
        assert row["label"] == str(results[row["data_source"]](large, small)), row
    for row in problems.generate_problems(split, 400, set(), [2, 3]):
        calculation = row["response"].removeprefix("\\boxed{").removesuffix("}")
        assert eval(calculation) == int(row["label"]), row
        assert {*find_numbers(calculation)} == {*find_numbers(read_question(row))}, row
        assert math_verdict("", row["response"], row["label"])["score"] == 1, row


def test_training_and_held_out_problems_share_no_words() -> None:
    one, other = (problems.LANGUAGE[split] for split in ("train", "held_out"))
    assert not set(one.names) & set(other.names) and not set(one.things) & set(other.things)
    wordings = [
        {wording for each in language.wordings.values() for wording in each}
        for language in (one, other)
    ]
    assert not wordings[0] & wordings[1]


@pytest.mark.parametrize("steps", [[1], [2, 3]])
def test_no_two_problems_have_the_same_numbers(steps: list[int]) -> None:
    made = [tuple(find_numbers(asked)) for asked, _ in problems.EXAMPLES]
    taken = problems.list_example_numbers()
    for split, count in (("held_out", 400), ("train", 3072)):
        made += [
            tuple(find_numbers(read_question(row)))
            for row in problems.generate_problems(split, count, taken, steps)
        ]
    assert len(set(made)) == len(made) == 3476, "5 + 3 is 3 + 5, and examples are problems, too"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[LlamaForCausalLM, Path]:
    """A small Llama, and the GGUF file that llama.cpp would write, with matrices of 4 bits."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=264, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, rope_theta=100000.0,
                         tie_word_embeddings=True,
                         max_position_embeddings=512, bos_token_id=1, eos_token_id=2,
                         pad_token_id=2)  # fmt: skip
    policy = LlamaForCausalLM(config)
    file = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = GGUFWriter(file, "llama")
    values = {"embedding_length": 64, "feed_forward_length": 96, "context_length": 512,
    "head_count": 4,
              "head_count_kv": 2, "block_count": 2, "layer_norm_rms_eps": 1e-6,
              "rope_freq_base": 100000.0,
              "vocab_size": 264, "tokenizer_model": "gpt2", "bos_token_id": 1, "eos_token_id": 2,
              "pad_token_id": 2}  # fmt: skip
    for name, value in values.items():
        getattr(writer, f"add_{name}")(value)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = special + sorted(ByteLevel.alphabet()) + ["he", "ll", "hell", "hello", "Ġhello"]
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (len(tokens) - 3))
    writer.add_token_merges(["h e", "l l", "he ll", "hell o", "Ġ hello"])
    writer.add_chat_template(
        "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
    )
    names = {theirs: ours for ours, theirs in model.TENSORS.items()}
    for name, parameter in policy.model.named_parameters():
        layer, _, rest = f"model.{name}".removesuffix(".weight").rpartition("layers.")
        number, _, kind = rest.partition(".")
        kind = names[kind if layer else rest]
        place = f"blk.{number}.{kind}.weight" if layer else f"{kind}.weight"
        if parameter.ndim == 1:
            writer.add_tensor(place, parameter.detach().numpy())
            continue
        parameter.data = torch.from_numpy(dequantize(quantize(parameter.detach().numpy(), Q4), Q4))
        weights = parameter.detach().numpy()
        if kind in ("attn_q", "attn_k"):  # the permutation of llama.cpp's convert_hf_to_gguf.py
            heads = 4 if kind == "attn_q" else 2
            weights = weights.reshape(heads, 2, -1, 64).swapaxes(1, 2).reshape(weights.shape)
        writer.add_tensor(place, quantize(weights, Q4), raw_dtype=Q4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return policy.eval(), file


def test_a_gguf_file_becomes_its_original_policy(
    original: tuple[LlamaForCausalLM, Path], tmp_path: Path
) -> None:
    policy, file = original
    model.write_policy(file, tmp_path / "policy")
    assert len({file.stat().st_mode for file in (tmp_path / "policy").iterdir()}) == 1, (
        "by the umask"
    )
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", dtype=torch.float32).eval()
    for name, weight in policy.state_dict().items():
        torch.testing.assert_close(back.state_dict()[name], weight, rtol=0, atol=0)
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(back(tokens).logits, policy(tokens).logits, rtol=0, atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "policy")
    assert tokenizer.decode(tokenizer("hello 12")["input_ids"]) == "hello 12"
    assert tokenizer.tokenize(" hello12<|im_end|>") == ["Ġhello", "1", "2", "<|im_end|>"]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert chat == "<|im_start|>hello<|im_end|>" and tokenizer.eos_token == "<|im_end|>"
