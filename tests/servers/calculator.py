"""The policy speaks, a tool answers, the policy goes on: as a conversation, and as slime's users write it."""

from functools import partial

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

TOOL = "=7\n"
"""What the tool says, whatever it was asked."""
FIRST_TURN = 6


async def rollout(client, prompt):
    tokens = prompt.token_ids.tolist()
    first = await client.generate(tokens, max_tokens=FIRST_TURN)
    told = client.tokenizer.encode(TOOL, add_special_tokens=False)
    second = await client.generate([*tokens, *first.token_ids, *told])
    return [first, told, second]


async def generate(args, sample: Sample, sampling_params) -> Sample:
    assert not args.partial_rollout, "partial rollout is not supported by this function"
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    encode = partial(GenerateState(args).tokenizer.encode, add_special_tokens=False)
    sample.tokens = encode(sample.prompt)
    budget = sampling_params["max_new_tokens"]
    for limit in (FIRST_TURN, budget):
        if sample.response_length:
            sample.append_response_tokens(args, tokens=encode(TOOL), trainable=False)
        left = min(limit, budget - sample.response_length)
        payload = {
            "input_ids": sample.tokens,
            "sampling_params": {**sampling_params, "max_new_tokens": left},
            "return_logprob": True,
        }
        meta = (await post(url, payload))["meta_info"]
        made = meta["output_token_logprobs"]
        tokens, log_probs = [item[1] for item in made], [item[0] for item in made]
        sample.append_response_tokens(args, tokens=tokens, log_probs=log_probs, meta_info=meta)
        if sample.status == Sample.Status.ABORTED:
            break
    return sample
