"""The policy and the problems of ``scripts/quickstart.sh --policy smollm2``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import dequantize, quantize
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tools.smollm2 import model, problems

ROWS = {split: list(problems.problems(split, 400, set())) for split in problems.LANGUAGE}
STEPS = {split: list(problems.problems(split, 400, set(), [2, 3])) for split in problems.LANGUAGE}


def question(row: dict) -> str:
    return row["prompt"][-1]["content"]


def test_a_label_is_what_the_numbers_of_the_question_make() -> None:
    results = {"add": int.__add__, "subtract": int.__sub__, "multiply": int.__mul__, "divide": int.__floordiv__}
    for row in (row for rows in ROWS.values() for row in rows):
        numbers = sorted(map(int, re.findall(r"\d+", question(row))), reverse=True)
        assert row["label"] == str(results[row["data_source"]](*numbers)), question(row)


def test_the_worked_answer_of_several_steps_makes_the_label_of_the_questions_numbers() -> None:
    for row in (row for rows in STEPS.values() for row in rows):
        calculation = row["response"].removeprefix("\\boxed{").removesuffix("}")
        assert eval(calculation) == int(row["label"]), row
        assert {*re.findall(r"\d+", calculation)} == {*re.findall(r"\d+", question(row))}, row


def test_training_and_held_out_problems_share_no_words_of_ours_and_no_calculation() -> None:
    one, other = (problems.LANGUAGE[split] for split in ("train", "held_out"))
    assert not set(one.names) & set(other.names) and not set(one.things) & set(other.things)
    wordings = [{wording for each in language.wordings.values() for wording in each} for language in (one, other)]
    assert not wordings[0] & wordings[1]


@pytest.mark.parametrize("steps", [[1], [2, 3]])
def test_no_two_problems_have_the_same_numbers(steps: list[int]) -> None:
    made = [tuple(sorted(map(int, re.findall(r"\d+", asked)))) for asked, _ in problems.EXAMPLES]
    taken = problems.in_examples()
    for split, count in (("held_out", 400), ("train", 3072)):
        for row in problems.problems(split, count, taken, steps):
            made.append(tuple(sorted(map(int, re.findall(r"\d+", question(row))))))
    assert len(set(made)) == len(made) == 3476, "no calculation twice: neither 5 + 3 for 3 + 5, nor an example's"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[LlamaForCausalLM, Path]:
    """A small Llama, and its GGUF file as llama.cpp would write it, with matrices of 4 bits."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=264, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, rope_theta=100000.0, tie_word_embeddings=True,
                         max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=2)  # fmt: skip
    policy = LlamaForCausalLM(config)
    file = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = GGUFWriter(file, "llama")
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_context_length(512)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_block_count(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(100000.0)
    writer.add_vocab_size(264)
    writer.add_tokenizer_model("gpt2")
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = special + sorted(ByteLevel.alphabet()) + ["he", "ll", "hell", "hello", "Ġhello"]
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (len(tokens) - 3))
    writer.add_token_merges(["h e", "l l", "he ll", "hell o", "Ġ hello"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")
    names = {theirs: ours for ours, theirs in model.TENSORS.items()}
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            layer, _, rest = f"model.{name}".removesuffix(".weight").rpartition("layers.")
            number, _, kind = rest.partition(".")
            kind = names[kind if layer else rest]
            values = parameter.float().numpy()
            if values.ndim == 2:
                quantized = quantize(values, GGMLQuantizationType.Q4_1)
                parameter.copy_(torch.from_numpy(dequantize(quantized, GGMLQuantizationType.Q4_1)))
                values = parameter.numpy()
            if kind in ("attn_q", "attn_k"):  # as llama.cpp's convert_hf_to_gguf.py permutes them
                heads = 4 if kind == "attn_q" else 2
                values = values.reshape(heads, 2, -1, 64).swapaxes(1, 2).reshape(values.shape)
            place = f"blk.{number}.{kind}.weight" if layer else f"{kind}.weight"
            if values.ndim == 2:
                writer.add_tensor(
                    place, quantize(values, GGMLQuantizationType.Q4_1), raw_dtype=GGMLQuantizationType.Q4_1
                )
            else:
                writer.add_tensor(place, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return policy.eval(), file


def test_a_gguf_file_becomes_the_policy_that_it_was_made_of(
    original: tuple[LlamaForCausalLM, Path], tmp_path: Path
) -> None:
    policy, file = original
    model.write_policy(file, tmp_path / "policy")
    assert len({file.stat().st_mode for file in (tmp_path / "policy").iterdir()}) == 1, "by the umask"
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
