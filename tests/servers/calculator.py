"""The policy speaks, a tool answers, the policy goes on."""

TOOL = "=7\n"
"""What the tool says, whatever it was asked."""
FIRST_TURN = 6


async def rollout(client, prompt):
    tokens = prompt.token_ids.tolist()
    first = await client.generate(tokens, max_tokens=FIRST_TURN)
    told = client.tokenizer.encode(TOOL, add_special_tokens=False)
    second = await client.generate([*tokens, *first.token_ids, *told])
    return [first, told, second]
