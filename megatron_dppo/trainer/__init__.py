"""What a trainer is put together from: the policy's parts, the learner, checkpoints, prompts, logs and checks."""
