"""The policy speaks, a tool answers, the policy goes on: as a conversation, and as slime's users write it."""

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


async def rollout_in_roles(client, prompt):
    first, told, second = await rollout(client, prompt)
    return [("asker", first), told, ("answerer", second)]


async def rollout_in_sequences(client, prompt):
    """An agent that goes on from what it has said last, and has forgotten the question."""
    first, told, second = await rollout(client, prompt)
    context = [*told, *second.token_ids][-4:]
    return [[first, told, second], [context, await client.generate(context, max_tokens=FIRST_TURN)]]


def reward_of_roles(data_source, solution_str, ground_truth, extra_info=None):
    """The asker's is that of the one who answers, and the answerer's is for a short answer."""
    of_answer = float(len(solution_str) % 2)
    return {"score": of_answer, "roles": {"answerer": -len(solution_str) / 10}}


async def generate(args, sample: Sample, sampling_params) -> Sample:
    assert not args.partial_rollout, "partial rollout is not supported by this function"
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    response_ids, loss_mask, log_probs = [], [], []
    budget = sampling_params["max_new_tokens"]
    for turn in range(2):
        left = min(FIRST_TURN, budget) if turn == 0 else budget - len(response_ids)
        payload = {
            "input_ids": prompt_ids + response_ids,
            "sampling_params": {**sampling_params, "max_new_tokens": left},
            "return_logprob": True,
        }
        output = await post(url, payload)
        if output["meta_info"]["finish_reason"]["type"] == "abort":
            sample.status = Sample.Status.ABORTED
            return sample
        made = output["meta_info"]["output_token_logprobs"]
        response_ids += [item[1] for item in made]
        log_probs += [item[0] for item in made]
        loss_mask += [1] * len(made)
        if turn == 0:
            tool_ids = state.tokenizer(TOOL, add_special_tokens=False)["input_ids"]
            response_ids += tool_ids
            log_probs += [0.0] * len(tool_ids)
            loss_mask += [0] * len(tool_ids)
    sample.tokens = prompt_ids + response_ids
    sample.response_length = len(response_ids)
    sample.response = state.tokenizer.decode(response_ids)
    sample.loss_mask = loss_mask
    sample.rollout_log_probs = log_probs
    reason = output["meta_info"]["finish_reason"]["type"]
    sample.status = Sample.Status.TRUNCATED if reason == "length" else Sample.Status.COMPLETED
    return sample
