"""A solver and a critic, in two contexts of one rollout."""

import openai


async def say(messages, client, **limits):
    answer = await client.chat.completions.create(model="policy", messages=messages, **limits)
    messages.append(answer.choices[0].message.model_dump())
    return answer.choices[0].message.content or "-"


async def agent(task):
    client = openai.AsyncOpenAI()
    solver, critic = [*task["prompt"]], [{"role": "system", "content": "review"}]
    for _ in range(2):
        solution = await say(solver, client, max_tokens=8)
        critic.append({"role": "user", "content": solution})
        review = await say(critic, client, max_tokens=4)
        solver.append({"role": "user", "content": review})
    return float(len(solution))
