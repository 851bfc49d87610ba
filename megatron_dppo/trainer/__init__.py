"""Parts of a trainer: the policy's parts, the learner, checkpoints, prompts, logs and checks."""
