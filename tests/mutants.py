"""Mistakes that tests must notice: ``python tests/mutants.py`` makes each in a copy of the package and runs its tests.

A mutant is caught where its tests fail. One that survives wants a better test. One whose text no longer stands in the
package once, wherever it has moved, wants a new text: ``tests/test_mutants.py`` says so at every run of the suite.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import importlib
import json
import multiprocessing
import os
import py_compile
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "megatron_dppo"
COPIED = (PACKAGE, "tests", "configs", "benchmarks", "docs", "pyproject.toml")
"""What the tests of a mutant need."""
TIMEOUT_S = 300.0
"""A mutant whose tests hang for so long is caught, too."""
IMPORTED = (
    "torch.distributed.checkpoint",
    "transformers",
    "megatron.core.optimizer",
    "aiohttp",
    "pyarrow",
)
"""What takes long to import, and is none of the package."""


class Mutant(NamedTuple):
    """A mistake."""

    name: str
    """With its area in front: ``loss/sign``."""
    text: str
    """What stands once in the package."""
    instead: str
    tests: str
    """What must fail, in pytest's spelling below ``tests/``, with spaces between."""


ROUTING = "trainer/test_routing_replay.py::test_what_is_replayed_depends_on_no_layout_and_on_no_recomputation"
AHEAD = "test_ahead.py::test_several_steps_ahead_a_run_goes_on_bit_by_bit_and_however_far_ahead_with_the_same_prompts"
WORDS = "test_ahead.py::test_the_next_step_is_drawn_from_all_that_is_known_and_asked_for_before_this_one_trains"
CUT = "test_split_invariance.py::test_completions_cut_into_sequences_are_trained_on_as_whole_ones"
MUTANTS = [
    # A user's own functions.
    Mutant(
        "own/a mean over the pack",
        "if not torch.allclose(whole, apart, rtol=1e-4, atol=1e-6):",
        "if False:",
        "trainer/test_functions.py::test_what_an_objective_must_not_be_is_refused",
    ),
    Mutant(
        "own/a gradient without an advantage",
        "if without[:first].any():",
        "if False:",
        "trainer/test_functions.py::test_what_an_objective_must_not_be_is_refused",
    ),
    Mutant(
        "own/grpo in its place",
        "(named if callable(named) else SURROGATES[named])(",
        "(SURROGATES.get(named, _clipped))(",
        "trainer/test_functions.py::test_what_an_objective_must_not_be_is_refused",
    ),
    Mutant(
        "own/a rule without a floor",
        "        probabilities = np.maximum(probabilities, candidates.floor)\n",
        "        pass\n",
        "rl/test_unbiasedness.py::test_a_rule_of_the_users_is_unbiased_whatever_it_returns",
    ),
    Mutant(
        "own/a rule for prompts without a floor",
        "np.maximum(own.inclusion(candidates, keep), candidates.floor)",
        "own.inclusion(candidates, keep)",
        "rl/test_unbiasedness.py::test_so_is_one_for_prompts",
    ),
    Mutant(
        "own/what is registered is not looked up",
        "(function := named if function is None else function) is not None",
        "function is not None",
        "test_api.py::test_registered_functions_are_named_in_settings",
    ),
    Mutant(
        "own/a reward that is no function",
        "_check_call(what, function, None)",
        "pass",
        "test_api.py::test_a_function_that_cannot_be_used_is_named",
    ),
    Mutant(
        "own/a callback without a parameter",
        "_check_call(name, callback, 1)",
        "pass",
        "test_api.py::test_a_function_that_cannot_be_used_is_named",
    ),
    Mutant(
        "own/what cannot be pickled is not named",
        "except Exception as error:  # of whatever it refers to",
        "except MemoryError as error:",
        "test_api.py::test_a_function_that_cannot_be_used_is_named",
    ),
    Mutant(
        "own/signals outside of the main thread",
        "ours = ENDING if threading.current_thread() is threading.main_thread() else ()",
        "ours = ENDING",
        "test_api.py::test_a_run_that_fails_says_why_to_the_process_that_calls",
    ),
    Mutant(
        "own/the reason stays with the ranks",
        "failed(failure.said())",
        'failed("")',
        "test_api.py::test_a_run_that_fails_says_why_to_the_process_that_calls",
    ),
    Mutant(
        "own/an objective that raises is not named",
        "return replace(own, surrogate=partial(_or_named, loss.objective, function))",
        "return own",
        "trainer/test_functions.py::test_what_a_function_raises_in_a_run_is_told_by_its_name",
    ),
    Mutant(
        "own/token ids beyond the vocabulary",
        "if not 0 <= token < vocabulary), None):",
        "if not 0 <= token), None):",
        "rollout/test_conversation.py",
    ),
    Mutant(
        "own/an environment that exits is not named",
        'except (Exception, SystemExit) as error:\n        problem = f"cannot be loaded',
        'except Exception as error:\n        problem = f"cannot be loaded',
        "data/test_verifiers.py::test_an_environment_that_ends_its_process_is_named",
    ),
    Mutant(
        "own/an environment that leaves without a result is not named",
        "if made.returncode or not made.stdout:",
        "if made.returncode:",
        "data/test_verifiers.py::test_an_environment_that_ends_its_process_is_named",
    ),
    Mutant(
        "own/a conversation that is cancelled by itself",
        "except (*FAILURES, asyncio.CancelledError) as error:",
        "except FAILURES as error:",
        "rollout/test_local_conversations.py",
    ),
    Mutant(
        "stored/the tokenizer is loaded with every batch",
        "tokenizer = cache(partial(load_tokenizer, policy))",
        "tokenizer = partial(load_tokenizer, policy)",
        "data/test_stored.py::test_the_tokenizer_is_loaded_once_for_all_batches",
    ),
    Mutant(
        "own/no number is a probability",
        "or not ((found >= 0.0) & (found <= 1.0)).all():",
        "or ((found < 0.0) | (found > 1.0)).any():",
        "rl/pruning/test_completion_rules.py::test_what_a_rule_must_not_return_is_refused",
    ),
    Mutant(
        "check/the next word is swallowed",
        'if word == "--check" and not following.isdecimal()',
        'if word == "--check" and not following',
        "launch/test_check.py::test_the_word_after_check_is_not_swallowed",
    ),
    Mutant(
        "check/stops at the first setting that is wrong",
        "mistakes += _explain(error)",
        "mistakes += _explain(error)[:1]",
        "launch/test_check.py",
    ),
    Mutant(
        "api/functions lose their names",
        "names[what] = function.__name__ if own else what",
        "names[what] = what",
        "test_api.py::test_a_run_with_ones_own_functions_tells_of_every_step_and_is_evaluated",
    ),
    Mutant(
        "resume/other files of the same name are not noticed",
        "now = fingerprints(config, given) if before else {}",
        "now = before",
        "trainer/test_fingerprints.py",
    ),
    Mutant(
        "resume/a function that is given again is compared with itself",
        "            if given and setting in given:\n",
        "            if False:\n",
        "trainer/test_fingerprints.py::test_a_function_from_python_is_known_by_its_text",
    ),
    Mutant(
        "resume/a function without source has that of an earlier one",
        '(folder / f"{what}{TEXT}").unlink(missing_ok=True)',
        "pass",
        "trainer/test_fingerprints.py::test_of_a_function_without_source_a_run_says_that_its_changes_are_not_noticed",
    ),
    Mutant(
        "resume/a value from Python is read as a word",
        "_lay, tree, key, _plain_value(value))",
        "_apply, tree, f'{key}={value}')",
        "test_settings.py -k python",
    ),
    Mutant(
        "settings/numbers are read by YAML 1.1",
        'return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))',
        'return int(text, 8 if text.startswith("0") else 10)',
        "test_settings.py -k type",
    ),
    Mutant(
        "data/nulls of parquet reach the prompt",
        "Row({name: without_nulls(value) for name, value in values.items()}, setting, place)",
        "Row(values, setting, place)",
        "data/test_rows_of_others.py -k parquet",
    ),
    Mutant(
        "data/tokens beyond the embedding are taken",
        "if not 0 <= token < rows]:",
        "if token < 0]:",
        "data/test_tokenizer.py",
    ),
    Mutant(
        "bridge/another output layer is dropped",
        "if name in found and not _are_equal(found[name], found[embedding]):",
        "if False:",
        "bridge/test_safetensors_files.py",
    ),
    Mutant(
        "data/stored rows are not checked",
        "return bool(crc32 == _crc32(folder / ROWS, summary))",
        "return True",
        "data/test_stored.py",
    ),
    Mutant(
        "data/drafts of running processes are removed",
        "fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)\n            shutil",
        "shutil",
        "data/test_stored.py -k drafts",
    ),
    Mutant(
        "data/white space hides what is held out",
        'words = " ".join(" ".join(said).split())',
        'words = " ".join(said)',
        "data/test_stored.py -k held_out",
    ),
    Mutant(
        "data/the last repeated problem is called the first",
        "first = held_out[found[0]]",
        "first = held_out[found[-1]]",
        "data/test_stored.py -k held_out",
    ),
    Mutant(
        "data/another row is named for what is held out",
        "np.flatnonzero(keys == known[found[0]])[0]",
        "np.flatnonzero(keys == known[found[-1]])[0]",
        "data/test_stored.py -k held_out",
    ),
    Mutant(
        "export/adapters are merged without their scale",
        "alpha=lora.alpha / lora.rank).to(dtype)",
        "alpha=1.0).to(dtype)",
        "test_lora.py::test_a_checkpoint_of_adapters_is_exported_for_peft_or_merged",
    ),
    Mutant(
        "export/adapters are merged into another policy",
        "if fingerprint(base, base if is_checkpoint else None) != adapters.fingerprint:",
        "if False:",
        "test_lora.py::test_adapters_are_merged_into_no_other_policy",
    ),
    Mutant(
        "plan/the optimizer's state is left out of the disk",
        "checkpoint=trained * (dtype + MASTER_AND_MOMENTS),",
        "checkpoint=trained * dtype,",
        "estimate/test_plan.py::test_text_and_json_say_the_same",
    ),
    Mutant(
        "report/a ratio's interval is of the seeds' own spread",
        "logs = [log(seconds[other] / seconds[one]) for one, other in pairs]",
        "logs = [log(seconds[other] / seconds[pairs[0][0]]) for one, other in pairs]",
        "report/test_figures.py::test_runs_that_differ_by_their_seed_alone_are_compared_with_an_interval",
    ),
    Mutant(
        "report/the headline's reward is of other steps than the line's",
        "say(reward.last, 'number')",
        "say(float(reward.y[-1]), 'number')",
        "report/test_page.py::test_headline_line_and_console_say_the_same_figure",
    ),
    Mutant(
        "check/columns",
        "if lacking := [name for name in wanted if name not in columns]:",
        "if lacking := [name for name in wanted if not columns]:",
        "launch/test_check.py::test_functions_and_columns_that_do_not_fit_are_found_without_a_rank",
    ),
    Mutant(
        "waiting/silence in a run",
        "self._said(client.health(timeout_s), partial(silent, server), first)",
        "client.health(timeout_s)",
        "servers/test_waiting.py",
    ),
    Mutant(
        "waiting/too many requests end one",
        "BUSY = (429, 503)",
        "BUSY = (503,)",
        "servers/test_waiting.py -k busy",
    ),
    Mutant(
        "waiting/no service now ends a request",
        "BUSY = (429, 503)",
        "BUSY = (429,)",
        "servers/test_waiting.py -k busy",
    ),
    Mutant(
        "waiting/completions are asked for once",
        "call = self.http.call if timeout_s is None else self.http.call_patiently",
        "call = self.http.call",
        "servers/test_waiting.py -k busy",
    ),
    Mutant(
        "waiting/a teacher that is busy ends the run",
        "answer = self._http.call_patiently(",
        "answer = self._http.call(",
        "rollout/test_teachers.py -k busy",
    ),
    Mutant(
        "waiting/whoever gives no completion has no name",
        'at and f"requests under way: {at}", late',
        "late",
        "servers/test_waiting.py -k gives_no_completion",
    ),
    Mutant(
        "waiting/whoever fell silent has no name",
        "self._lost[server.url] = problems[server.url]",
        "pass",
        "servers/test_waiting.py -k fell_silent",
    ),
    Mutant(
        "waiting/asyncio complains of what was given up",
        "task.add_done_callback(lambda done: done.cancelled() or done.exception())\n    return await work",
        "return await work",
        "servers/test_conversations.py::test_asyncio_says_nothing_of_what_was_given_up_and_failed",
    ),
    Mutant(
        "waiting/silence",
        "wait_s = SAY_AFTER_S if wait_s is None else wait_s",
        "wait_s = 90.0 if wait_s is None else wait_s",
        "servers/test_waiting.py",
    ),
    Mutant(
        "interrupt/the last checkpoint",
        "goes on from step {step} of {config.run.steps}",
        "goes on from step 0 of {config.run.steps}",
        "launch/test_start.py::test_ctrl_c_says_from_where_a_run_goes_on_and_how_it_is_asked_to_save",
    ),
    Mutant(
        "profile/every other step",
        "if step not in self._steps:",
        "if step in self._steps:",
        "observe/test_profile.py",
    ),
    Mutant(
        "profile/no phases",
        "self._timers.named = record_function",
        "self._timers.named = nullcontext",
        "observe/test_profile.py",
    ),
    # Loggers.
    Mutant(
        "loggers/a step twice",
        'if step <= self._state[name]["step"]:',
        'if step < self._state[name]["step"]:',
        "observe/test_loggers.py::test_steps_that_are_taken_again_are_not_logged_again_and_a_new_run_is_a_new_one",
    ),
    Mutant(
        "loggers/another run",
        'known["run"] if known else None',
        "None",
        "observe/test_loggers.py::test_steps_that_are_taken_again_are_not_logged_again_and_a_new_run_is_a_new_one",
    ),
    Mutant(
        "loggers/a row is lost",
        "            self._keep(name, before)\n            raise",
        "            raise",
        "observe/test_loggers.py::test_a_row_that_a_logger_did_not_take_is_given_to_it_again_and_it_is_said",
    ),
    Mutant(
        "loggers/nothing of before",
        'row for row in past if row["step"] >',
        'row for row in past if row["step"] < 0 <',
        "observe/test_loggers.py::test_a_logger_that_is_named_later_is_given_the_steps_before",
    ),
    Mutant(
        "loggers/left open",
        "        to_close.callback(self.logger.close)\n",
        "",
        "observe/test_loggers.py::test_a_run_that_ends_early_closes_its_loggers",
    ),
    Mutant(
        "loggers/secrets",
        "if not key.startswith(PRIVATE)}",
        "if key}",
        "observe/test_loggers.py::test_a_logger_is_told_the_settings_without_what_may_have_a_secret_in_it",
    ),
    # Tokens for rewards, and offline rollouts.
    Mutant(
        "rewards/tokens of the group",
        "made = token_ids.tolist(), loss_mask.tolist(), completion.finish_reason, policy",
        "made = [], [], completion.finish_reason, policy",
        "rollout/test_scoring.py::test_trls_functions_are_given_the_tokens_that_the_engine_made",
    ),
    Mutant(
        "rewards/killed once while it imports, the run is over",
        "code < 0 and not worker.again",
        "code < 0 and worker.again",
        "rewards/test_workers.py -k killed_once_while_importing",
    ),
    Mutant(
        "rewards/a worker complains that its trainer is gone",
        "except (EOFError, ConnectionResetError):  # the trainer",
        "except EOFError:  # the trainer",
        "rewards/test_workers.py -k gone_before_it_read",
    ),
    Mutant(
        "offline/no weights",
        "config.rollout.ahead or config.data.rollouts",
        "config.rollout.ahead",
        "test_offline.py::test_tokens_have_the_weight_of_policy_over_behaviour_up_to_the_cap",
    ),
    Mutant(
        "offline/every group on every rank",
        "prompt_ids % ranks == rank",
        "prompt_ids % ranks >= 0",
        "test_offline.py::test_each_group_is_on_one_rank_and_prompts_have_none_of_it",
    ),
    Mutant(
        "offline/the version of the run",
        "OFFLINE = -1",
        "OFFLINE = 0",
        "test_offline.py::test_tokens_have_the_weight_of_policy_over_behaviour_up_to_the_cap",
    ),
    Mutant(
        "offline/the engine generates",
        "if self._offline is not None:\n            return Begun",
        "if self._offline is None:\n            return Begun",
        "test_offline.py::test_a_file_of_the_policys_own_rollouts_is_trained_on_as_they_were",
    ),
    Mutant(
        "offline/no loss mask",
        "np.ones(len(tokens), bool) if mask is None else",
        "np.ones(len(tokens), bool) if True else",
        "test_offline.py::test_texts_are_tokenised_and_a_stop_token_ends_them",
    ),
    # The loss and its sums.
    Mutant(
        "loss/sign",
        "torch.minimum(unclipped, clipped), clipped <",
        "torch.maximum(unclipped, clipped), clipped <",
        "rl/test_losses.py",
    ),
    Mutant(
        "loss/upper clip",
        "1.0 - self.objective.clip_low, 1.0 + self.objective.clip_high",
        "1.0 - self.objective.clip_low, 1.0 + self.objective.clip_low",
        "rl/test_losses.py",
    ),
    Mutant(
        "loss/engine correction without its cap",
        "ratio if cap is None else ratio.clamp(max=cap)",
        "ratio",
        "rl/test_losses.py",
    ),
    Mutant(
        "loss/kl the wrong way",
        "= reference_logprobs - logprobs",
        "= logprobs - reference_logprobs",
        "rl/test_losses.py",
    ),
    Mutant(
        "loss/sequence ratio without a gradient",
        "ratio_of(self.sequences.sums(log_ratio, mean=True) + self.logprobs - self.logprobs.detach())",
        "ratio_of(self.sequences.sums(log_ratio, mean=True) + 0.0 * self.logprobs)",
        "rl/test_losses.py",
    ),
    Mutant(
        "loss/an infinite ratio",
        "return torch.exp(capped) * (1.0 + (log_ratio - capped))",
        "return torch.exp(log_ratio)",
        "rl/test_losses.py -k overflow",
    ),
    Mutant(
        "loss/ratios that stop growing",
        "return torch.exp(capped) * (1.0 + (log_ratio - capped))",
        "return torch.exp(capped)",
        "rl/test_losses.py -k overflow",
    ),
    Mutant(
        "loss/an infinite k3",
        "return ratio_of(difference) - difference - 1.0",
        "return torch.exp(difference) - difference - 1.0",
        "rl/test_losses.py::test_k3_of_an_overflow_is_finite_and_pulls_toward_the_reference",
    ),
    Mutant(
        "loss/an infinite weight",
        "    ratio = ratio_of(log_ratio)\n    masked",
        "    ratio = torch.exp(log_ratio)\n    masked",
        "rl/test_losses.py::test_a_weight_of_an_overflowing_ratio_is_a_number_without_a_cap",
    ),
    Mutant(
        "loss/cispo's clip has a gradient",
        "ratio = tokens.ratio.detach()",
        "ratio = tokens.ratio",
        "rl/test_objective_formulas.py -k cispo",
    ),
    Mutant(
        "loss/gmpo clips on both sides",
        "torch.where(positive, log_ratio.clamp(max=high), log_ratio.clamp(min=low))",
        "log_ratio.clamp(min=low, max=high)",
        "rl/test_objective_formulas.py -k gmpo",
    ),
    Mutant(
        "loss/sapo with one temperature",
        ".masked_fill(tokens.advantage > 0.0, positive)",
        "",
        "rl/test_objective_formulas.py -k sapo",
    ),
    Mutant(
        "loss/trust region keeps from coming back",
        "(advantage > 0.0) & (away > 0.0) & (divergence",
        "(advantage > 0.0) & (divergence",
        "rl/test_losses.py -k trust_region",
    ),
    Mutant(
        "loss/trust region around the policy before the step",
        "away, advantage = tokens.logprobs.detach() - tokens.engine, tokens.advantage",
        "away, advantage = tokens.logprobs.detach() - tokens.old, tokens.advantage",
        "rl/test_losses.py -k trust_region",
    ),
    Mutant(
        "loss/KL of one outcome",
        "term(log_q.exp(), log_p.exp()) + term(-log_q.expm1(), -log_p.expm1())",
        "term(log_q.exp(), log_p.exp())",
        "rl/test_losses.py -k trust_region",
    ),
    Mutant(
        "loss/masked weights stay",
        "torch.where(masked, 0.0, ",
        "torch.where(masked & False, 0.0, ",
        "rl/test_losses.py",
    ),
    Mutant(
        "loss/weight of a sequence is its tokens' mean",
        'sequences.sums(log_ratio) if objective.tis_level == "sequence"',
        'sequences.sums(log_ratio, mean=True) if objective.tis_level == "sequence"',
        "rl/test_losses.py",
    ),
    Mutant(
        "loss/rloo's baseline knows its own reward",
        "result = deviation * (samples / np.maximum(samples - 1, 1))[:, None]",
        "result = deviation",
        "rl/test_group_sizes.py -k others",
    ),
    Mutant(
        "loss/moments of what was rolled out",
        "weight = shares(samples, present, 1) / prompt_inclusion[:, None]",
        "weight = shares(samples, present, 1)",
        "rl/test_minibatch_moments.py",
    ),
    Mutant(
        "loss/moments in which large groups count more",
        "weight = shares(samples, present, 1) / prompt_inclusion[:, None]",
        "weight = present / prompt_inclusion[:, None]",
        "rl/test_minibatch_moments.py",
    ),
    Mutant(
        "pruning/equal rewards promise nothing to a minibatch's mean",
        "accuracy * (1.0 - mean) ** 2 + (1.0 - accuracy) * mean**2",
        "accuracy * (1.0 - accuracy) + 0.0 * mean",
        "rl/pruning/test_history.py -k minibatch",
    ),
    Mutant(
        "loss/stale tokens count as mismatch",
        "torch.where(fresh, mismatch, 0.0).sum()",
        "mismatch.sum()",
        "rl/test_losses.py",
    ),
    Mutant(
        "loss/sample deviation",
        "np.sqrt(np.mean(deviation**2, axis=1, keepdims=True))",
        "np.sqrt(np.sum(deviation**2, axis=1, keepdims=True) / max(deviation.shape[1] - 1, 1))",
        "rl/test_objectives.py",
    ),
    Mutant(
        "loss/sample deviation of a group's own size",
        "size = np.full_like(samples, as_of) if as_of else samples",
        "size = samples",
        "rl/test_objectives.py -k subgroups",
    ),
    Mutant(
        "loss/deviation=sample has no effect",
        'if objective.normalise and objective.deviation == "sample":',
        "if False:",
        "rl/test_objectives.py::test_the_sample_deviation_is_that_of_the_other_trainers",
    ),
    Mutant(
        "loss/sample deviation where nothing is divided",
        'if objective.normalise and objective.deviation == "sample":',
        'if objective.deviation == "sample":',
        "rl/test_objectives.py::test_the_sample_deviation_is_that_of_the_other_trainers",
    ),
    Mutant(
        "loss/mixed groups by rounded advantages",
        "mixed = (rewards != rewards[:, :1]).any(axis=1, keepdims=True)",
        "mixed = (rewards != rewards.mean(axis=1, keepdims=True)).any(axis=1, keepdims=True)",
        "rl/test_objectives.py",
    ),
    Mutant(
        "loss/rounding of double precision alone",
        "ROUNDING = 2.0**-21",
        "ROUNDING = 2.0**-50",
        "rl/test_rounding.py",
    ),
    Mutant(
        "loss/rounding at one scale alone",
        "np.abs(rewards)).max(axis=1, keepdims=True, initial=0.0)",
        "1.0).max(axis=1, keepdims=True, initial=0.0)",
        "rl/test_rounding.py",
    ),
    Mutant(
        "loss/normaliser of what was rolled out",
        "return float(prompts * group_size)",
        "return float(len(sampled_lengths) * group_size)",
        "rl/test_objectives.py",
    ),
    Mutant(
        "loss/tokens of pruned prompts forgotten",
        "(sampled_lengths.sum(axis=1) * share[:, 0] / prompt_inclusion).sum()",
        "sampled_lengths.sum()",
        "rl/test_objectives.py",
    ),
    Mutant(
        "loss/a sequence weighs its tokens",
        "weight * pruned.coefficient[group, completion] / pruned.normaliser",
        "weight / pruned.normaliser",
        "test_formula.py::test_update_is_that_of_the_formula[grpo-0.0]",
    ),
    Mutant(
        "loss/overlong penalty from the limit on",
        "(limit - buffer - lengths) / buffer",
        "(limit - lengths) / buffer",
        "rl/test_objectives.py",
    ),
    # Rollouts ahead.
    Mutant(
        "ahead/what was asked for last is trained on first",
        "self.queue.popleft() if self.queue",
        "self.queue.pop() if self.queue",
        f"{AHEAD} {WORDS}",
    ),
    Mutant(
        "ahead/rollouts that are too old by now are trained on",
        "batch.oldest_version >= oldest",
        "batch.oldest_version <= self.version",
        AHEAD,
    ),
    Mutant("ahead/nobody holds the bound", "if oldest > bound:", "if oldest < 0:", "rollout/test_collect.py"),
    Mutant(
        "ahead/prompts that were drawn and not asked are not saved",
        "                steps.append(batch)\n",
        "                steps += [batch] if isinstance(batch, RolloutsInFlight) else []\n",
        AHEAD,
    ),
    Mutant(
        "ahead/what was broken off begins anew",
        "for one in each if not one.fresh",
        "for one in each if one.ended",
        "servers/test_dispatch.py::test_what_is_broken_off_goes_on_from_the_tokens_that_it_has",
    ),
    Mutant(
        "ahead/what had ended is asked for again",
        "left = alike_so_far([sample for sample in samples if not sample.ended])",
        "left = alike_so_far(samples)",
        "servers/test_dispatch.py::test_what_is_broken_off_goes_on_from_the_tokens_that_it_has",
    ),
    Mutant(
        "ahead/what is broken off is asked on",
        "            batch.broken_off = True\n",
        "            pass\n",
        "servers/test_dispatch.py::test_what_is_broken_off_goes_on_from_the_tokens_that_it_has",
    ),
    Mutant(
        "ahead/goes on however old it is",
        "and one.completion.oldest_version >= oldest",
        "and oldest >= 0",
        "rollout/test_in_flight.py -k broken_off",
    ),
    Mutant(
        "ahead/a version is a step",
        "self.sync(self.version + learned.updated)",
        "self.sync(self.step + 1 if learned.updated else self.version)",
        "test_ahead.py::test_where_no_weight_has_moved_tokens_are_fresh_also_after_a_death",
    ),
    Mutant(
        "ahead/what is in flight for later steps is not read",
        "takewhile(lambda folder: (folder / _STEP).exists(), folders)",
        "takewhile(lambda folder: folder.name == FOLDER and (folder / _STEP).exists(), folders)",
        "rollout/test_in_flight.py",
    ),
    Mutant(
        "ahead/a batch is over with three quarters of its prompts",
        "await _all(self._prompt(batch, index) for index in range(len(batch.prompts)))",
        "for first in itertools.islice(asyncio.as_completed([self._prompt(batch, index) for index in range(len("
        "batch.prompts))]), len(batch.prompts) * 3 // 4):\n            await first",
        "servers/test_dispatch.py::test_what_is_trained_on_is_as_long_as_what_is_sampled",
    ),
    Mutant(
        "ahead/a rank that waits for a judge cannot be ended",
        "signal.signal(number, signal.SIG_DFL)\n    if LAUNCHER",
        "signal.signal(number, signal.SIG_IGN)\n    if LAUNCHER",
        "trainer/test_resume.py::test_a_run_ends_within_two_seconds_though_a_judge_hangs_and_rollouts_are_in_flight",
    ),
    # What sequences share.
    Mutant(
        "prefixes/descendants see an ancestor's padding",
        "keys = cu_seqlens[segment] + np.arange(tree.tokens[segment])",
        "keys = cu_seqlens[segment] + np.arange(lengths[segment])",
        "models/test_prefix_attention.py",
    ),
    Mutant(
        "prefixes/positions begin anew in each segment",
        "positions=np.arange(capacity) - np.repeat(starts[:-1] - begins, sizes)",
        "positions=np.arange(capacity) - np.repeat(starts[:-1], sizes)",
        "rl/test_pack.py",
    ),
    Mutant(
        "prefixes/the gradient of a stretch by itself",
        "of_queries = each.query_rows(out), each.query_rows(total)",
        "of_queries = kernel.forward(read, each, ctx.scale)[0], each.query_rows(total)",
        "models/test_prefix_attention.py",
    ),
    Mutant(
        "prefixes/what stood between two kept ones is forgotten",
        "shared[group[k], completion[k - 1] + 1 : completion[k] + 1].min()",
        "shared[group[k], completion[k]]",
        "rl/test_families.py",
    ),
    Mutant(
        "prefixes/a split segment's padding is free",
        "more += padded(common - left) + padded(ends[stay] - common) - padded(ends[stay] - left)",
        "more += 0",
        "rl/test_families.py",
    ),
    Mutant(
        "prefixes/a pack repeats what its samples share in its cost",
        "work = pieces.sums(costs(lengths, pieces.shared))",
        "work = pieces.sums(costs(lengths))",
        "rl/test_packing.py -k family",
    ),
    # Roles.
    Mutant(
        "roles/rewards of those who are silent",
        'speaks = known["tokens"] > 0\n',
        'speaks = known["tokens"] >= 0\n',
        "rl/test_roles.py",
    ),
    Mutant(
        "roles/one group for all",
        'rewards = np.take_along_axis(known["reward"][rows], speakers_first, axis=1)',
        "rewards = np.take_along_axis(part.rewards[rows], speakers_first, axis=1)",
        "rl/test_roles.py",
    ),
    Mutant(
        "roles/advantages out of order",
        "np.put_along_axis(of_role, speakers_first, found, axis=1)",
        "of_role = found",
        "rl/test_roles.py",
    ),
    Mutant(
        "roles/one advantage for a conversation",
        "if self.roles is None else self.roles[steps]",
        "if self.roles is None else 0 * self.roles[steps]",
        "rl/test_roles.py",
    ),
    Mutant(
        "sequences/each with a length of its own",
        "scale=weight * pruned.coefficient[group, completion] / pruned.normaliser,",
        "scale=weight * pruned.coefficient[group, completion] / pruned.normaliser * (1 + sequence),",
        f"rl/test_sequences.py {CUT}",
    ),
    Mutant(
        "sequences/the first alone is trained on",
        "np.column_stack([np.ones(len(further), np.int64), further])",
        "np.column_stack([np.ones(len(further), np.int64), 0 * further])",
        "rl/test_sequences.py",
    ),
    Mutant(
        "sequences/one goes on from the other",
        "return completion.token_ids[of.start : of.start + 1], slice(of.start + 1, of.stop)",
        "return completion.token_ids[:1], slice(of.start + 1, of.stop)",
        CUT,
    ),
    Mutant(
        "sequences/contexts are shown to the verifier",
        "shown = [first, *(slice(of.start + int(np.argmax(completion.loss_mask[of])), of.stop) for of in further)]",
        "shown = [first, *further]",
        "rl/test_sequences.py rollout/test_collect.py::"
        "test_of_several_sequences_the_verifier_sees_what_was_said_and_the_longest_is_overlong",
    ),
    Mutant(
        "sequences/the last one's norm for all",
        "np.hypot.at(score_norms, (samples.group[which], samples.completion[which]), np.asarray(values))",
        "score_norms[samples.group[which], samples.completion[which]] = values",
        "trainer/test_head_scores.py",
    ),
    Mutant(
        "sequences/after other tokens than their context",
        "before, longest = ([], len(start) + limit) if number else (start, limit)",
        "before, longest = (start, len(start) + limit) if number else (start, limit)",
        "rollout/test_conversation.py",
    ),
    Mutant(
        "sequences/lost on the way from a server",
        "starts=tuple(at + start for at, part in zip(befores, parts, strict=False) for start in part.starts),",
        "",
        "servers/test_conversations.py::test_sequences_stay_apart",
    ),
    Mutant(
        "sequences/an engine's own are not looked at",
        "if problem := malformed(len(prompt.token_ids), completion, config.rollout.max_response_tokens):",
        "if problem := None:",
        "rl/test_sequences.py",
    ),
    Mutant(
        "sequences/lost in a checkpoint",
        "tuple(map(int, starts))",
        "()",
        "rollout/test_in_flight.py::test_sequences_come_back",
    ),
    Mutant(
        "sequences/of a whole one, and several let through",
        'if objective.ratio == "sequence" or objective.surrogate == "geometric":',
        'if objective.ratio == "sequence":',
        "rl/test_sequences.py",
    ),
    Mutant(
        "sequences/read by a teacher as one",
        "asked = [prompt_and_response(prompt.token_ids, completion, k) for k in range(len(sequences(completion)))]",
        "asked = [(prompt.token_ids, slice(0, len(said)))]",
        "rollout/test_teachers.py::test_a_server_reads_each_sequence_by_itself",
    ),
    Mutant(
        "roles/a mean of advantages",
        "size = np.sqrt((parts**2 * share).sum(axis=-1))",
        "size = np.abs((parts * share).sum(axis=-1))",
        "rl/test_roles.py rl/test_tree_plan.py",
    ),
    Mutant(
        "roles/lost where parts are joined",
        "_roles(parts) if any(part.roles is not None for part in parts) else None",
        "None",
        "servers/test_conversations.py::test_each_token_comes_with_its_role",
    ),
    Mutant(
        "roles/lost on the way",
        "completion.roles[of] + np.int8(1)",
        "np.sign(completion.roles[of] + np.int8(1))",
        "parallel/test_exchange.py::test_tokens_keep_their_roles_on_the_way",
    ),
    # Trees.
    Mutant(
        "trees/a segment's own value in its baseline",
        "(total + other_roots) / (count + 1.0)",
        "(total + value + other_roots) / (count + 2.0)",
        "rl/test_trees.py",
    ),
    Mutant(
        "trees/the mean of all roots",
        "(values[0].sum(axis=1, keepdims=True) - values[0]) / (roots - 1)",
        "values[0].mean(axis=1, keepdims=True) + 0.0 * values[0]",
        "rl/test_trees.py",
    ),
    Mutant(
        "trees/what was not generated in a baseline",
        "(generated * value).reshape(shape)",
        "value.reshape(shape)",
        "rl/test_trees.py",
    ),
    Mutant(
        "trees/weights of one level alone",
        'np.cumprod(forks["weight"], axis=-1)',
        'forks["weight"]',
        "rl/test_trees.py",
    ),
    Mutant(
        "trees/a path in several slots counts once",
        "np.add.at(once, (np.arange(len(rewards))[:, None], first_slots(lengths, forks, tree)), slots)",
        "once[np.arange(len(rewards))[:, None], first_slots(lengths, forks, tree)] = slots",
        "rl/test_trees.py",
    ),
    Mutant(
        "trees/the first token of a branch",
        'np.searchsorted(self.forks, steps, side="right")',
        'np.searchsorted(self.forks, steps, side="left")',
        "rl/test_tree_plan.py",
    ),
    # Pruning.
    Mutant(
        "pruning/weight without the prompt's probability",
        "completion_weight(pruning.named, candidates, inclusion, keep) / part.prompt_inclusion[:, None]",
        "completion_weight(pruning.named, candidates, inclusion, keep)",
        "rl/test_unbiasedness.py",
    ),
    Mutant(
        "pruning/score without the first draw",
        "magnitudes(part, advantage, config) * c * score_norms / prompt_inclusion",
        "magnitudes(part, advantage, config) * c * score_norms",
        "rl/test_unbiasedness.py::test_the_second_draw_knows_of_the_first",
    ),
    Mutant(
        "pruning/floor of one level alone",
        "np.minimum(1.0 / (config.pruning.max_weight * prompt_inclusion), 1.0)",
        "np.minimum(1.0 / (config.pruning.max_weight + 0 * prompt_inclusion), 1.0)",
        "rl/test_plan.py",
    ),
    Mutant(
        "pruning/offset of the draw", "start = int(offset * GRID)", "start = GRID - 1", "rl/pruning/test_sampling.py"
    ),
    Mutant(
        "pruning/sums that rounding misses",
        "if 0 < abs(missing) <= len(fractional):",
        "if False and 0 < abs(missing) <= len(fractional):",
        "rl/pruning/test_sampling.py",
    ),
    Mutant(
        "pruning/score over cost",
        "scores[scored] / np.sqrt(costs[scored])",
        "scores[scored] / costs[scored]",
        "rl/pruning/test_sampling.py",
    ),
    Mutant(
        "pruning/mean itself is pruned",
        "scores < mean * (1.0 - ROUNDING)",
        "scores <= mean * (1.0 + ROUNDING)",
        "rl/pruning/test_completion_rules.py rl/pruning/test_prompt_rules.py",
    ),
    Mutant(
        "pruning/biased rule of prompts weighs up",
        "weighted = np.ones_like(inclusion) if rule.biased else inclusion",
        "weighted = inclusion",
        "rl/pruning/test_prompt_rules.py",
    ),
    Mutant(
        "pruning/budget of prompts in place of tokens",
        "cost = candidates.expected_tokens / candidates.expected_tokens.mean()",
        "cost = np.ones_like(candidates.expected_tokens)",
        "rl/pruning/test_prompt_rules.py",
    ),
    Mutant(
        "pruning/a step is learned before it is predicted",
        "judgement = self._judge(visits)",
        "self._learn(visits); judgement = self._judge(visits)",
        "rl/pruning/test_forecast.py::test_a_step_is_predicted_before_it_is_learned",
    ),
    Mutant(
        "pruning/visits fade with visits",
        'self._update - found["update"]',
        "1.0",
        "rl/pruning/test_success_model.py::test_a_visit_counts_less_the_more_the_policy_was_updated",
    ),
    Mutant(
        "pruning/what was predicted is not resumed",
        'super().state_dict() | {"models": models, ',
        "super().state_dict() | {",
        "rl/pruning/test_forecast.py trainer/test_prompt_sampler.py",
    ),
    Mutant(
        "pruning/squares with the draw's weight",
        "terms = known.score * metadata.prompt_inclusion[:, None]",
        "terms = known.score",
        "trainer/test_prompt_sampler.py::test_what_is_learned_of_a_gradient_has_no_weight_of_the_draw",
    ),
    Mutant("pruning/evidence never fades", 'self.decay * old["right"]', 'old["right"]', "rl/pruning/test_history.py"),
    Mutant(
        "pruning/a step less of full training",
        "if total_steps - step <= round(",
        "if total_steps - step < round(",
        "rl/pruning/test_schedule.py",
    ),
    Mutant(
        "pruning/window of prompts left out",
        "metadata.window * len(groups) / max(1, len(metadata.prompt_ids))",
        "metadata.window",
        "rl/test_plan.py",
    ),
    Mutant(
        "pruning/failed groups take nothing of the window along",
        "return window * left / (left + failed)",
        "return float(window)",
        "rollout/test_collect.py",
    ),
    Mutant(
        "pruning/order forgotten over a resume",
        'self._order.load_state_dict(state["order"])',
        'state["order"]',
        "trainer/test_prompt_sampler.py",
    ),
    # Groups of unequal size.
    Mutant(
        "sizes/a large group counts more",
        "return share * each",
        "return (share > 0.0) * each",
        "rl/test_group_sizes.py",
    ),
    Mutant(
        "sizes/a mean over fewer, and nothing made up for it",
        "* ((m - 1) / m) / ((n - 1) / n)",
        "",
        "rl/test_group_sizes.py",
    ),
    Mutant(
        "sizes/deviations of whole groups",
        "    if n == m:\n",
        "    if n == m or normalise:\n",
        "rl/test_group_sizes.py",
    ),
    Mutant(
        "sizes/sub-groups that hold the completion twice",
        "math.comb(highs - 1, k - 1)",
        "math.comb(highs, k)",
        "rl/test_group_sizes.py",
    ),
    Mutant(
        "sizes/windows that do not close",
        "+ np.arange(m)) % n]",
        "+ np.arange(m)).clip(max=n - 1)]",
        "rl/test_group_sizes.py",
    ),
    Mutant(
        "sizes/padding takes part in the draw",
        "group, sample = np.nonzero(candidates.present)",
        "group, sample = np.nonzero(candidates.present | True)",
        "rl/test_group_sizes.py",
    ),
    Mutant(
        "sizes/padding has its prompt's tokens",
        "np.where(self.present, self.prompt_lengths[:, None] + self.response_lengths, 0)",
        "self.prompt_lengths[:, None] + self.response_lengths",
        "rl/test_group_sizes.py",
    ),
    Mutant(
        "sizes/padding is trained on under KL",
        "& rewards_alone) | ~present",
        "& rewards_alone)",
        "rl/test_group_sizes.py",
    ),
    Mutant(
        "sizes/padding has a reward",
        "(differs & metadata.present)",
        "differs",
        "rl/test_group_sizes.py rollout/test_collect.py",
    ),
    Mutant(
        "sizes/padding counts in a share to keep",
        "round(keep * candidates.present.sum())",
        "round(keep * magnitude.size)",
        "rl/test_group_sizes.py",
    ),
    Mutant(
        "sizes/to the most varied, however many they have",
        "-gain[q] / (n * (n + 1))",
        "-gain[q]",
        "rl/test_allocation.py",
    ),
    Mutant(
        "sizes/numbers without the prompt's probability",
        "square / selection.inclusion**2",
        "square",
        "trainer/test_prompt_sampler.py",
    ),
    Mutant(
        "sizes/large groups promise more",
        "        square *= (counts_as or rewards.shape[1]) / rewards.shape[1]\n",
        "",
        "rl/pruning/test_history.py",
    ),
    Mutant(
        "sizes/the local engine gives all as many",
        "root_of(prompt, sampling.count(index), branches)",
        "root_of(prompt, sampling.samples, branches)",
        "rollout/test_local.py",
    ),
    Mutant(
        "sizes/servers give all as many",
        "root_of(self.prompts[index], self.sampling.count(index), ",
        "root_of(self.prompts[index], self.sampling.samples, ",
        "servers/test_dispatch.py",
    ),
    Mutant(
        "sizes/conversations as many as there may be",
        "counts=(len(samples),)",
        "counts=()",
        "servers/test_conversations.py",
    ),
    Mutant(
        "sizes/groups in flight are cut alike",
        "islice(completions, size)",
        "islice(completions, metadata.rewards.shape[1])",
        "rollout/test_in_flight.py",
    ),
    # Packs, and the way of tokens.
    Mutant(
        "packs/predictor off by one",
        "predictors=_joined(slots[at - 1] for",
        "predictors=_joined(slots[at] for",
        "rl/test_pack.py",
    ),
    Mutant(
        "packs/given tokens are trained on",
        "[np.flatnonzero(sample.loss_mask) for sample in samples]",
        "[np.arange(len(sample.response_ids)) for sample in samples]",
        "rl/test_pack.py",
    ),
    Mutant(
        "packs/positions go on from segment to segment",
        "np.arange(capacity) - np.repeat(starts[:-1] - begins, sizes),",
        "np.arange(capacity),",
        "rl/test_pack.py",
    ),
    Mutant(
        "packs/sequences are not padded to the layout",
        "np.arange(len(lengths) + 1), -(-lengths // align) * align,",
        "np.arange(len(lengths) + 1), lengths,",
        "rl/test_packing.py",
    ),
    Mutant(
        "packs/ranks have unequal numbers",
        "if len(shares[rank]) < per_rank:",
        "if len(shares[rank]) <= per_rank:",
        "rl/test_packing.py",
    ),
    Mutant("packs/balance by tokens", "self.quadratic * squares", "0.0 * squares", "rl/test_packing.py"),
    Mutant(
        "packs/log-probabilities delivered as tokens",
        "[b:c].view(np.float32)",
        "[a:b].view(np.float32)",
        "parallel/test_exchange.py",
    ),
    Mutant(
        "packs/a rank's late chunk is another's",
        "[[rank, 2 * size - 1 - rank]]",
        "[[rank, size + rank]]",
        "models/test_context.py",
    ),
    Mutant(
        "packs/gradients of others' responses",
        "whole = part.logprobs.new_zeros(len(there), responses)",
        "whole = part.logprobs.new_full((len(there), responses), 1e-3)",
        "models/test_context.py",
    ),
    # The policy head.
    Mutant(
        "head/a rank's own peak",
        "sums[3:].mul_(factor.square())",
        "sums[3:].mul_(factor)",
        "models/test_policy_head.py",
    ),
    Mutant(
        "head/normaliser without the peak",
        "ctx.save_for_backward(hidden, weight, targets, peak + total.log())",
        "ctx.save_for_backward(hidden, weight, targets, total.log())",
        "models/test_policy_head.py",
    ),
    # A teacher.
    Mutant(
        "teacher/divergence the wrong way round",
        'reverse = teacher.direction == "reverse"',
        'reverse = teacher.direction == "forward"',
        "models/test_teacher_head.py",
    ),
    Mutant(
        "teacher/gradient without the divergence",
        "own.sub_(other).sub_(divergence[chunk, None]).mul_(spare[0])",
        "own.sub_(other).mul_(spare[0])",
        "models/test_teacher_head.py",
    ),
    Mutant(
        "teacher/ranks' own peaks in the ratio",
        "cross.add_((shift[of] - shift[to]) * totals[of]).mul_(factor[of])",
        "cross.mul_(factor[of])",
        "models/test_teacher_head.py::test_vocabulary_over_two_ranks_equals_one",
    ),
    Mutant(
        "teacher/divergence without a gradient under context parallelism",
        'LEARNED = ("logprobs", "divergence")',
        'LEARNED = ("logprobs",)',
        "test_distillation.py::test_an_update_toward_several_teachers_depends_on_no_layout",
    ),
    Mutant(
        "teacher/no coefficient",
        "token_loss + self._distillation_coef * responses.divergence",
        "token_loss + responses.divergence",
        "test_distillation.py::test_update_is_that_of_the_formula",
    ),
    Mutant(
        "teacher/rewards trained on all the same",
        "if not config.loss.distillation.use_task_rewards:",
        "if False:",
        "test_distillation.py::test_update_is_that_of_the_formula",
    ),
    Mutant(
        "teacher/equal rewards dropped",
        "~part.log_ratios.any(axis=-1) & (config.loss.kl_coef == 0.0)",
        "config.loss.kl_coef == 0.0",
        "rl/test_unbiasedness.py::test_so_it_is_with_a_teacher_of_all_prompts_or_of_some",
    ),
    Mutant(
        "teacher/scores of advantages alone",
        "np.hypot(advantage + pull[..., 0], pull[..., 1])",
        "np.abs(advantage)",
        "test_distillation.py::test_scores_count_the_teacher",
    ),
    Mutant(
        "teacher/prompts by their rewards",
        "if self._taught:\n            return self._size",
        "if False:\n            return self._size",
        "rl/pruning/test_forecast.py::test_with_a_teacher_prompts_whose_rewards_never_differ_count_by_their_gradients",
    ),
    Mutant(
        "teacher/of another source",
        "(mine[k] == number)[packs[k].sample]",
        "(mine[k] >= 0)[packs[k].sample]",
        "test_distillation.py::test_update_is_that_of_the_formula",
    ),
    Mutant(
        "teacher/places among another rank's tokens",
        "mine if share is None else mine[share.mine]",
        "mine if share is None else mine[: len(share.mine)]",
        "test_distillation.py::test_update_is_that_of_the_formula",
    ),
    Mutant(
        "teacher/a server's log-ratio the wrong way round",
        "arrays.teacher_logprobs - logprobs.detach()",
        "logprobs.detach() - arrays.teacher_logprobs",
        "test_distillation.py::test_a_server_s_gradient_is_on_average_that_of_the_divergence",
    ),
    Mutant(
        "teacher/a server's log-ratio to whoever sampled",
        "arrays.teacher_logprobs - logprobs.detach()",
        "arrays.teacher_logprobs - arrays.engine_logprobs",
        "test_distillation.py::test_a_server_s_gradient_is_on_average_that_of_the_divergence",
    ),
    Mutant(
        "teacher/a server's log-ratios unweighted in scores",
        "np.expm1(logprobs) ** 2 + 1e-12",
        "np.ones_like(logprobs)",
        "test_distillation.py::test_scores_of_a_server_are_the_norms_of_its_tokens_advantages",
    ),
    Mutant(
        "teacher/the engine's log-probabilities for a server's",
        "part[c:d].view(np.float32) if self.taught",
        "part[b:c].view(np.float32) if self.taught",
        "parallel/test_exchange.py",
    ),
    Mutant(
        "teacher/rollouts that nobody has read",
        "(c.teacher_logprobs is not None) == distillation.served(source)",
        "True",
        "rollout/test_in_flight.py::test_a_batch_knows_whether_its_teachers_are_those_of_the_run",
    ),
    Mutant(
        "teacher/other tokens",
        "if len(told) != len(response) or [token for token, _ in told] != asked:",
        "if len(told) != len(response):",
        "rollout/test_teachers.py",
    ),
    Mutant("teacher/another vocabulary", "if ours != theirs:", "if False:", "rollout/test_teachers.py"),
    Mutant(
        "teacher/asked at the end alone",
        "            reading.look(groups)\n",
        "",
        "rollout/test_teachers.py::test_a_step_s_rollouts_are_read_while_others_are_generated_and_so_are_offline_ones",
    ),
    # Weights between Megatron and Hugging Face.
    Mutant(
        "weights/up before gate",
        '"mlp.gate_proj.weight", "mlp.up_proj.weight"',
        '"mlp.up_proj.weight", "mlp.gate_proj.weight"',
        "bridge/test_mapping.py",
    ),
    Mutant(
        "weights/all queries before all keys",
        "Slice(name, group * size, (group + 1) * size) for group in groups for name, size in heads.items()",
        "Slice(name, group * size, (group + 1) * size) for name, size in heads.items() for group in groups",
        "bridge/test_mapping.py",
    ),
    Mutant(
        "weights/padding in front",
        "return tuple(part for part in (held, padding) if part.length)",
        "return tuple(part for part in (padding, held) if part.length)",
        "bridge/test_mapping.py",
    ),
    Mutant(
        "weights/layers counted from each stage",
        "str(numbers[int(local[0])])",
        "local[0]",
        "bridge/test_stream.py::test_round_trip_is_the_identity_in_every_layout -k Qwen3-fp32-False",
    ),
    Mutant(
        "weights/a truncated file passes",
        "if size < end:",
        "if size < data:",
        "bridge/test_safetensors_files.py",
    ),
    Mutant(
        "weights/more tensors than the policy has",
        "unexpected = [name for name in found if name not in allowed]",
        "unexpected = [name for name in found if False]",
        "bridge/test_safetensors_files.py",
    ),
    Mutant(
        "weights/bytes beside the rows",
        "data[(low - top) * row_bytes : (high - top) * row_bytes]",
        "data[: (high - low) * row_bytes]",
        "bridge/test_chunks.py",
    ),
    Mutant(
        "weights/a saved tensor without its tail",
        "write_at(file, end, with_checksum([archive.tail]))",
        "write_at(file, end, [archive.tail])",
        "bridge/test_torch_dist.py bridge/test_checkpoint_folder.py bridge/test_verify.py",
    ),
    # Routing replay.
    Mutant("routing/layers of another stage", "[:, self._columns[chunk]]", "[:, : len(self._columns[chunk])]", ROUTING),
    Mutant("routing/microbatches come back last first", "self._again.popleft()", "self._again.pop()", ROUTING),
    Mutant("routing/another rank's share", "of_tokens[share.held.numpy()]", "of_tokens[: len(share.held)]", ROUTING),
    Mutant(
        "routing/not known is expert 255",
        "torch.where(known, target, own)",
        "torch.where(known, target, target % 4)",
        "models/test_routing.py",
    ),
    Mutant(
        "routing/one token late",
        "read[row, : length - 1]",
        "read[row, 1:length]",
        "rollout/test_local.py::test_the_experts_of_every_token_but_the_last_are_those_of_a_plain_forward",
    ),
    Mutant(
        "routing/not kept with rollouts in flight",
        'if "routing" in stored else repeat(None)',
        'if "routings" in stored else repeat(None)',
        "rollout/test_in_flight.py",
    ),
    # The stream of weights to servers and engines.
    Mutant(
        "stream/tied output twice",
        ".is_copy:",
        ".is_copy and False:",
        "bridge/test_stream.py::test_stages_may_have_more_buckets_than_others",
    ),
    Mutant(
        "stream/the next gather waits for the consumer",
        "            gather = gathers.start(following)\n        moved()\n        yield tensors\n",
        "            yield tensors\n            gather = gathers.start(following)\n"
        "        else:\n            yield tensors\n",
        "bridge/test_stream.py::test_the_next_gather_has_begun_when_a_bucket_is_handed_out",
    ),
    Mutant(
        "stream/norms from every rank",
        "split is Split.REPLICATED else entry.parts(layout))",
        "split is None else entry.parts(layout))",
        "bridge/test_stream.py::test_a_consumer_is_sent_what_it_does_not_have_and_nothing_twice",
    ),
    Mutant(
        "stream/stages send from the first one's ranks",
        "first = (item.stage - self._first_stage) * self._world.copy_size",
        "first = 0",
        "bridge/test_stream.py::test_a_consumer_is_sent_what_it_does_not_have_and_nothing_twice",
    ),
    Mutant(
        "stream/experts from the first ranks",
        "first += entry.expert_rank(layout.ep) * layout.expert_tp",
        "first += 0",
        "bridge/test_stream.py::test_round_trip_is_the_identity_in_every_layout",
    ),
    # Experts and virtual stages.
    Mutant(
        "experts/summed over all replicas",
        'if ".mlp.experts." in name:',
        "if False:",
        "test_split_invariance.py -k MoE",
    ),
    Mutant(
        "experts/counted from 0 on each rank",
        "first_expert = world.ep_rank * (chunks[0].shape.experts // world.layout.ep)",
        "first_expert = 0",
        "bridge/test_stream.py::test_round_trip_is_the_identity_in_every_layout",
    ),
    Mutant(
        "experts/clipped by their own norm",
        "max_norm=most, total_norm=grad_norm)",
        "max_norm=most, total_norm=part.get_grad_norm())",
        "models/test_experts.py::test_gradients_of_experts_and_others_are_clipped_by_one_norm",
    ),
    Mutant(
        "experts/their gradients are summed over the ranks of others",
        "one_group = len(parts) == 1 or optimizer.grads_states_parallel_group_is_shared()",
        "one_group = True",
        "models/test_gradient_norm.py -k experts",
    ),
    Mutant(
        "experts/one optimizer's gradients only",
        "for part in some for gradient in _counted_once(part)]",
        "for part in some[:1] for gradient in _counted_once(part)]",
        "models/test_gradient_norm.py -k experts",
    ),
    Mutant(
        "experts/a pack's routing is kept",
        "        _release_dispatched(chunk)\n",
        "",
        "rehearsal/test_rehearsal.py::test_a_step_keeps_no_memory",
    ),
    Mutant(
        "norm/of this rank's gradients",
        "        dist.all_reduce(square, group=some[0].get_grad_stats_parallel_group())\n",
        "",
        "models/test_gradient_norm.py",
    ),
    Mutant(
        "stages/two of them send in batches",
        "cuda and not (layout.vpp > 1 and layout.pp == 2)",
        "cuda",
        "models/test_experts.py::test_two_interleaved_stages_do_not_send_in_batches",
    ),
    Mutant(
        "stages/virtual ones one after the other",
        "starts = [turn * sum(chunks) + sum(chunks[:stage]) for turn in range(layout.vpp)]",
        "starts = [sum(counts[:stage]) + turn * chunks[stage] for turn in range(layout.vpp)]",
        "parallel/test_layout.py",
    ),
    Mutant(
        "packs/fewer than interleaved stages",
        "len(lengths) // ranks), least_per_rank)",
        "len(lengths) // ranks), 1)",
        "rl/test_packing.py",
    ),
    Mutant(
        "stream/buckets without a limit",
        "if size > room:",
        "if not buckets:",
        "bridge/test_stream.py::test_planned_buckets_are_as_full_as_the_order_allows",
    ),
    # Checkpoints, and what a run goes on from.
    Mutant(
        "checkpoints/a changed byte passes",
        "if left or crc != block.crc:",
        "if left:",
        "bridge/test_checksums.py",
    ),
    Mutant(
        "checkpoints/shares leave blocks out",
        "blocks[share::of]",
        "blocks[share :: of + 1]",
        "bridge/test_checksums.py",
    ),
    Mutant(
        "checkpoints/an altered list of checksums",
        '(stored["format"], stored["crc32"]) == (_FORMAT, _crc_of(files))',
        'stored["format"] == _FORMAT',
        "bridge/test_checksums.py",
    ),
    Mutant(
        "checkpoints/another type of weights",
        "if written.dtype != now.dtype:",
        "if False:",
        "trainer/test_preflight.py",
    ),
    Mutant(
        "checkpoints/buffers cut otherwise",
        "if wanted != (ours := {name: getattr(now, name) for name in CUT}):",
        "if False:",
        "trainer/test_preflight.py",
    ),
    Mutant(
        "checkpoints/the optimizer's settings come from the checkpoint",
        'if name not in ("params", "step")}',
        "if name in ()}",
        "trainer/test_checkpoint.py::test_the_optimizer_keeps_the_settings_of_the_command_that_resumes",
    ),
    Mutant(
        "checkpoints/one more is kept",
        "[: -self._keep]",
        "[: -self._keep - 1]",
        "trainer/test_checkpoint.py::test_resumed_updates_are_those_of_an_undisturbed_run -k cp2",
    ),
    Mutant(
        "checkpoints/no look at the disk first",
        "        if free < needed:\n",
        "        if free < 0:\n",
        "trainer/test_checkpoint.py::test_full_disk_is_told_on_every_rank_and_costs_no_checkpoint",
    ),
    Mutant(
        "checkpoints/rows of steps that are taken again",
        'if row["step"] <= step]',
        "]",
        "observe/test_metrics.py",
    ),
    Mutant(
        "checkpoints/a file is replaced at once",
        '    partial = file.with_name(file.name + ".partial")\n    yield partial\n    partial.replace(file)\n',
        "    file.unlink(missing_ok=True)\n    yield file\n",
        "process/test_files.py",
    ),
    Mutant(
        "checkpoints/what a kill put aside is lost",
        "        if former.exists() and not out.exists():  # killed",
        "        if False:  # killed",
        "process/test_files.py",
    ),
    Mutant(
        "checkpoints/a held folder is entered",
        "if lives or not self._has_fallen_silent(holder):",
        "if False:",
        "process/test_lock.py",
    ),
    Mutant(
        "rewards/scores in the order in which groups came",
        "[scores[place] for place in places]",
        "[*scores.values()]",
        "rollout/test_scoring.py",
    ),
    Mutant(
        "rewards/nothing is given out before the end",
        "return self._scoring.advance()",
        "return False",
        "rollout/test_scoring.py",
    ),
    # Servers, without real ones.
    Mutant(
        "servers/complete groups are looked at when all are",
        "busy = look is not None and look(batch.take_complete())",
        "busy = batch.is_over and look is not None and look(batch.take_complete())",
        "servers/test_dispatch.py",
    ),
    Mutant(
        "servers/what goes on waits behind what was not begun",
        "sorted(self._waiting, key=lambda waits: waits[0])",
        "self._waiting[::-1]",
        "servers/test_dispatch.py",
    ),
    Mutant(
        "servers/others take the place of what goes on",
        "asyncio.get_running_loop().call_soon(self._next)",
        "self._next()",
        "servers/test_dispatch.py",
    ),
    Mutant(
        "servers/drafts that change what is sampled",
        'part in flag.replace("_", "-") for part',
        "part in flag for part",
        "trainer/test_preflight_servers.py",
    ),
    Mutant(
        "rollout/a guess is taken without its draw",
        "(drawn[:, :-1] == guesses)",
        "(guesses == guesses)",
        "rollout/test_drafts.py",
    ),
    Mutant(
        "rollout/the cache stays where rows have moved",
        "self._cache.depart(departure, self._reach)",
        "pass",
        "rollout/test_local.py",
    ),
    Mutant(
        "rollout/padding is seen by what is decoded",
        "later = torch.arange(width, device=tokens.device) > positions.unsqueeze(-1)",
        "later = torch.arange(width, device=tokens.device) >= width + positions.unsqueeze(-1)",
        "rollout/test_local.py",
    ),
    Mutant(
        "servers/the shortest first",
        "np.argsort(-candidates.expected_tokens",
        "np.argsort(candidates.expected_tokens",
        "trainer/test_prompt_sampler.py",
    ),
    Mutant(
        "pruning/groups of any size are as many trials",
        "visits.samples.astype(np.float64)",
        "np.full(len(visits.samples), float(visits.rewards.shape[1]))",
        "rl/pruning/test_forecast.py::test_padding_behind_smaller_groups_teaches_nothing",
    ),
    Mutant(
        "servers/a continuation has all tokens anew",
        "max_tokens=sampling.max_tokens - first.length",
        "max_tokens=sampling.max_tokens",
        "servers/test_dispatch.py servers/test_tree_dispatch.py",
    ),
    Mutant(
        "servers/older weights pass",
        "if version is None or version < oldest:",
        "if version is None:",
        "servers/test_dispatch.py",
    ),
    Mutant(
        "servers/one seed for every attempt",
        "(batch, samples, attempt)",
        "(batch, samples, 0)",
        "servers/test_dispatch.py",
    ),
    Mutant(
        "servers/too few samples pass",
        "!= len(samples):",
        "> len(samples):",
        "servers/test_dispatch.py",
    ),
    Mutant(
        "servers/no limit of prompts under way",
        "< self._max_in_flight]",
        "< 10**9]",
        "servers/test_dispatch.py",
    ),
    Mutant(
        "servers/another version than was sent",
        ".version()) != version:",
        ".version()) is None:",
        "servers/test_sync.py",
    ),
    Mutant(
        "servers/checksums are not the actor's",
        "if known and not of_actor.startswith(checksum):",
        "if False:",
        "servers/test_sync.py",
    ),
    Mutant(
        "servers/tensors overlap in a bucket",
        "flat[start:end].view(tensor.dtype).view(tensor.shape)",
        "flat[: end - start].view(tensor.dtype).view(tensor.shape)",
        "servers/test_sender.py::test_every_bucket_arrives_byte_by_byte_though_its_memory_is_used_again",
    ),
    Mutant(
        "servers/one buffer for two buckets",
        "self._turn ^= 1",
        "self._turn = 0",
        "servers/test_sender.py::test_every_bucket_arrives_byte_by_byte_though_its_memory_is_used_again",
    ),
    Mutant(
        "servers/the local engine repeats its luck",
        'f"{seed}/{prompt_id}/{sample}"',
        'f"{seed}/{prompt_id}"',
        "rollout/test_sampling.py rollout/test_local.py",
    ),
    # Trees of completions.
    Mutant(
        "trees/a fork in hindsight",
        "np.flatnonzero(entropies[first:] > branch.entropy)",
        "np.flatnonzero(entropies[first + 1 :] > branch.entropy)",
        "rollout/test_tree.py -k path_forks",
    ),
    Mutant(
        "trees/what was generated by chance counts as if it always were",
        "(*path.completion.fork_weights[:level], 1.0 / fork.keep)",
        "(*path.completion.fork_weights[:level], 1.0)",
        "rollout/test_tree.py -k not_generated",
    ),
    Mutant(
        "trees/a child that was not generated counts",
        "weights[level] = 0.0",
        "weights[level] = 1.0",
        "rollout/test_tree.py -k not_generated",
    ),
    Mutant(
        "trees/vLLM's entropy knows the token drawn",
        "logprobs[: TOP_LOGPROBS - 1]",
        "logprobs[:TOP_LOGPROBS]",
        "servers/test_vllm_answers.py",
    ),
    Mutant(
        "trees/siblings have other experts for the last token that they share",
        "len(path.stem.prompt.token_ids) + position)",
        "len(path.stem.prompt.token_ids) + position - 1)",
        "servers/test_tree_dispatch.py",
    ),
    Mutant(
        "trees/what leaves share counts at each of them",
        "completion.forks[level - 1] if level else 0",
        "0",
        "rollout/test_collect.py -k trees",
    ),
    # Conversations with the local engine.
    Mutant(
        "conversations/a turn repeats the luck of another",
        "self.prompt.id + self.asked * TURN",
        "self.prompt.id",
        "rollout/test_local_conversations.py",
    ),
    Mutant(
        "conversations/a slow tool is not waited for",
        "if all(place in self._asked for place in under_way):",
        "if self._asked:",
        "rollout/test_local_conversations.py",
    ),
    Mutant(
        "conversations/a turn has no length of its own",
        "limit = left if max_tokens is None else min(left, max_tokens)",
        "limit = left",
        "rollout/test_local_conversations.py",
    ),
    Mutant(
        "conversations/turns end where responses do",
        "replace(self._sampling, stop_token_ids=stops)",
        "self._sampling",
        "rollout/test_local_conversations.py",
    ),
    Mutant(
        "conversations/servers are compared by conversations",
        "self.finish(self._attempt(prompts, sampling, None))",
        "self.finish(self.begin(prompts, sampling))",
        "rollout/test_local_conversations.py",
    ),
    # Environments of verifiers, where that is installed.
    Mutant(
        "verifiers/a reward function that fails is worth nothing",
        "raise sys.exc_info()[1] or RuntimeError(record.getMessage())",
        "return",
        "data/test_verifiers.py",
    ),
    Mutant(
        "verifiers/held-out problems are trained on",
        'if (number in held_out) == (split == "eval")',
        'if number in held_out or split == "train"',
        "data/test_verifiers.py",
    ),
    Mutant(
        "verifiers/an environment keeps the signals",
        "for number, handler in taken.items():",
        "for number, handler in ():",
        "data/test_verifiers.py",
    ),
    Mutant(
        "verifiers/the policy closes its turn twice",
        "told = token_ids[1:] if token_ids[:1] == [self._last] else token_ids",
        "told = token_ids",
        "data/test_turns.py",
    ),
    Mutant(
        "verifiers/a template may change what stands before",
        "if whole.count(MARK) != 1 or not whole.startswith(until):",
        "if whole.count(MARK) != 1:",
        "data/test_turns.py",
    ),
    Mutant(
        "verifiers/an environment may forget what was said",
        "if _words(messages[:known]) != _words(self._messages):",
        "if False:",
        "data/test_turns.py",
    ),
    Mutant(
        "verifiers/another answer is not noticed",
        "if (told[: len(given)] if ends_here else told) != given:",
        "if False:",
        "data/test_turns.py",
    ),
    Mutant(
        "verifiers/a conversation may go on when it is scored",
        'raise OtherAnswerError("went on")',
        "raise NothingLeftError",
        "data/test_turns.py",
    ),
    Mutant(
        "verifiers/a conversation may end early when it is scored",
        'raise OtherAnswerError("ended")',
        "return",
        "data/test_turns.py",
    ),
    Mutant(
        "verifiers/conversations of the environment are scored as one turn",
        "again = _again if _has_several_turns(environment) else _again_in_one_turn",
        "again = _again_in_one_turn",
        "data/test_verifiers.py -k answers_otherwise",
    ),
    Mutant(
        "verifiers/scores take all tokens for the policy's",
        "made = token_ids.tolist(), loss_mask.tolist(), completion.finish_reason, policy",
        "made = token_ids.tolist(), (), completion.finish_reason, policy",
        "data/test_verifiers.py -k conversations_have",
    ),
    Mutant(
        "verifiers/several turns need no conversation",
        "if any(SEVERAL_TURNS in each for each in problems()):",
        "if False:",
        "data/test_verifiers.py -k lacks",
    ),
    Mutant(
        "verifiers/the policy's calls are forgotten when it goes on",
        "return message if message != given else",
        "return message if message else",
        "data/test_verifiers.py -k tools",
    ),
    Mutant(
        "verifiers/a problem's tools need not be those that it was told of",
        "if (tools or []) != self._tools:",
        "if False:",
        "data/test_verifiers.py -k tools",
    ),
    Mutant(
        "lora/a merged matrix is its last rows, again and again",
        "        data += rows",
        "        data = bytearray(rows) * (len(data) // len(rows) + 1)",
        "test_lora.py -k peft_or_merged",
    ),
    Mutant(
        "check/what stumbles over a mistake hides all others",
        "            if not stumbles:",
        "            if True:",
        "launch/test_check.py -k stumbles",
    ),
    Mutant(
        "tools/what can be read of a turn is called",
        "if not calls or None in calls or",
        "if not any(calls) or",
        "data/test_tool_calls.py",
    ),
    Mutant(
        "tools/thoughts call them",
        "thoughts, end, words = text.rpartition(_HAS_THOUGHT)",
        'thoughts, end, words = "", "", text',
        "data/test_tool_calls.py",
    ),
    Mutant(
        "tools/all prompts are told of those of the first",
        "for tools, run in groupby(examples, lambda example: example.tools):",
        "for tools, run in [(examples[0].tools, examples)] if examples else []:",
        "data/test_tool_calls.py",
    ),
    # Rewards.
    Mutant(
        "rewards/groups are taken apart",
        "self._queue.popleft() if worker.takes_groups else self._next_item()",
        "self._next_item()",
        "rewards/test_groups.py",
    ),
    Mutant(
        "rewards/more completions are awaited at once than may be",
        "share = min(self._owner._concurrency, ",
        "share = max(self._owner._concurrency, ",
        "rewards/test_together.py -k so_many_completions",
    ),
    Mutant(
        "rewards/one process awaits all",
        "math.ceil(unanswered / len(ready))",
        "unanswered",
        "rewards/test_together.py -k spread",
    ),
    Mutant(
        "rewards/completions are awaited one by one",
        "and limits.concurrency > 1 else None",
        "and False else None",
        "rewards/test_together.py -k so_many_completions",
    ),
    Mutant(
        "rewards/no clock for a completion that is awaited",
        "asyncio.timeout(clock_s)",
        "asyncio.timeout(None)",
        "rewards/test_together.py -k waits_too_long",
    ),
    Mutant(
        "rewards/processor time of a completion that is awaited is not counted",
        "signal.setitimer(signal.ITIMER_PROF, self._left_s)",
        "signal.setitimer(signal.ITIMER_PROF, 0.0)",
        "rewards/test_together.py -k spin",
    ),
    Mutant(
        "rewards/of several that are open the first is to blame",
        "if worker.awaits and len(worker.pending) > 1:",
        "if False:",
        "rewards/test_together.py -k costs_no_other",
    ),
    Mutant(
        "rewards/scores are missing",
        "if len(scores := list(returned)) != len(items):",
        "scores = list(returned)\n        if False:",
        "rewards/test_groups.py",
    ),
    Mutant(
        "rewards/a group has the time of one completion",
        "limit_s = timeout_s * len(items)",
        "limit_s = timeout_s",
        "rewards/test_groups.py",
    ),
    Mutant(
        "rewards/a group that fails counts once",
        "self._scored.errors += len(unit)",
        "self._scored.errors += 1",
        "rewards/test_groups.py",
    ),
    Mutant(
        "rewards/a function that hangs is waited for",
        "signal.setitimer(signal.ITIMER_PROF, limit_s)",
        "signal.setitimer(signal.ITIMER_PROF, 0.0)",
        "rewards/test_workers.py::test_function_that_hangs_costs_its_completion_only -k spin",
    ),
    Mutant(
        "rewards/no second worker for what one has died over",
        "if unit.start in self._lost_once:",
        "if True:",
        "rewards/test_workers.py::test_completion_whose_worker_was_killed_once_is_scored_by_another",
    ),
    Mutant(
        "rewards/a box in thoughts that were cut off",
        "opening in answer or (not closed",
        "(not closed",
        "rewards/test_thoughts.py",
    ),
    Mutant(
        "rewards/thoughts that the prompt opens",
        "and prompt.rstrip().endswith(opening)",
        "and opening in prompt",
        "rewards/test_thoughts.py",
    ),
    Mutant(
        "rewards/tags are left out with the special tokens",
        "if not special.keys() & self._tags:",
        "if True:",
        "rewards/test_thoughts.py",
    ),
    Mutant(
        "rewards/a word is true",
        "return bool(number) if number in (0.0, 1.0) else None",
        "return bool(value)",
        "rl/test_given.py",
    ),
    Mutant(
        "teacher/likelier than certain",
        "(logprobs <= LOGPROB_ROUNDING)",
        "(logprobs <= np.inf)",
        "rollout/test_teachers.py -k log_probabilities_are_none",
    ),
    Mutant(
        "offline/half a token is trained on",
        "if not np.isin(mask, (0, 1)).all():",
        "if False:",
        "test_offline.py -k bad_row",
    ),
    Mutant(
        "rewards/not a number",
        "if not math.isfinite(reward):",
        "if False:",
        "rewards/test_functions.py",
    ),
    Mutant(
        "rewards/half right is correct",
        "return reward, is_right(reward)\n",
        "return reward, reward > 0.0\n",
        "rewards/test_functions.py",
    ),
    Mutant(
        "rewards/a logarithm of numbers above zero alone",
        "if _signs_matter(one, other):",
        "if False:",
        "rewards/test_verdicts.py -k public_sets",
    ),
    Mutant(
        "rewards/any decimal is an approximation",
        "abs(_fraction(value) - number.value) < Fraction(1, 10**number.decimals)",
        "True",
        "rewards/test_verdicts.py -k public_sets",
    ),
    Mutant(
        "rewards/another text of the same letter",
        "expected[0] == found[0] and self.same(expected[1], found[1])",
        "expected[0] == found[0]",
        "rewards/test_verdicts.py -k public_sets",
    ),
    Mutant(
        "rewards/a tuple in any order",
        "return len(expected) == len(found) and all(map(self.same, expected, found))",
        "return len(expected) == len(found) and all(any(self.same(a, b) for b in found) for a in expected)",
        "rewards/test_verdicts.py",
    ),
    Mutant(
        "rewards/one member stands for several",
        "            del left[partner]\n",
        "",
        "rewards/test_verdicts.py rewards/test_mutations.py",
    ),
    # What trainer and engine owe each other.
    Mutant(
        "agreement/no number passes every limit",
        "        if measured <= limit:\n            continue\n",
        "        if not measured > limit:\n            continue\n",
        "trainer/test_learner.py::test_a_difference_that_is_no_number_is_past_every_limit",
    ),
    Mutant(
        "agreement/temperature of the next token",
        "torch.log_softmax(logits / temperature if temperature > 0 else logits, dim=-1)",
        "torch.log_softmax(logits, dim=-1)",
        "rollout/test_sampling.py",
    ),
    Mutant(
        "agreement/the run is never hopeless",
        "return 0 < self._most <= self._idle",
        "return 0 < self._most < self._idle",
        "trainer/test_collapse.py::test_only_steps_in_a_row_count",
    ),
    # What is typed, and what is shown.
    Mutant(
        "settings/a list wants its brackets",
        "checked[name] = _listed(settings()[key], value)",
        "checked[name] = value",
        "test_settings.py -k brackets",
    ),
    Mutant(
        "streams/any terminal shows all signs",
        'return plain in ("C", "POSIX")',
        "return False",
        "process/test_streams.py -k ascii",
    ),
    Mutant(
        "report/ticks between whole numbers",
        "[step for step in steps if step.is_integer()] or [1.0]",
        "steps",
        "report/test_figures.py -k ticks",
    ),
    Mutant(
        "report/rewards of chosen prompts count like others",
        'run.setting("pruning.prompts.rule") not in (None, "none") for run in runs',
        "False for run in runs",
        "report/test_page.py -k incomparable",
    ),
    Mutant(
        "evaluation/a wrong answer is filed as right",
        'right = sum(row["correct"] is True for row in answers)',
        'right = sum(row["correct"] is not None for row in answers)',
        "test_eval.py::test_a_run_s_checkpoint_has_the_accuracy_that_the_trainer_measured",
    ),
    Mutant(
        "export/a card shows paths",
        'return _name(value) if named or ("/" in value and (" " not in value or Path(value).exists())) else value',
        "return value",
        "test_export.py -k tells_nothing",
    ),
    Mutant(
        "export/a card shows all settings",
        "if key.startswith(SHOWN) and key not in SECRET and (value := run.setting(key))",
        "if (value := run.setting(key))",
        "test_export.py -k tells_nothing",
    ),
    Mutant(
        "export/what was measured after the checkpoint counts",
        '[row for row in run.rows if step >= row["step"]]',
        "list(run.rows)",
        "test_export.py -k last_checkpoint",
    ),
    Mutant(
        "export/anybody's card is replaced",
        "ours = [CARD] if _is_ours(out / CARD) else []",
        "ours = [CARD]",
        "test_export.py -k nobody_else",
    ),
    Mutant(
        "launch/a job takes an override for its file",
        'return sorted(words, key=lambda word: "=" in word and not Path(word).is_file())',
        "return list(words)",
        "launch/test_job_script.py -k whole",
    ),
    Mutant(
        "launch/a dry run needs NeMo-Run",
        "    if dry_run:\n        print(slurm_script",
        "    _nemo_run()\n    if dry_run:\n        print(slurm_script",
        "launch/test_job_script.py -k whole",
    ),
    Mutant(
        "progress/what was done before tells how fast it is",
        "(total - so_far) / (so_far - done)",
        "(total - so_far) / so_far",
        "process/test_progress.py -k start",
    ),
    Mutant(
        "progress/bars where nobody looks",
        "if not (shown and sys.stderr.isatty()):",
        "if not shown:",
        "process/test_progress.py -k elsewhere",
    ),
    # The estimate of what a run needs.
    Mutant(
        "estimate/a step ahead takes both of its parts",
        "max(rollouts, training) if levers.ahead else rollouts + training",
        "rollouts + training",
        "estimate/test_levers.py",
    ),
    Mutant(
        "estimate/pruning is cheaper than what prunes as much",
        "p.prompts <= levers.prompts and p.completions <= levers.completions",
        "p.prompts <= levers.prompts or p.completions <= levers.completions",
        "estimate/test_levers.py",
    ),
    Mutant(
        "estimate/what has no gradient is trained on without pruning",
        "min(levers.completions, mixed) / mixed",
        "levers.completions",
        "estimate/test_levers.py",
    ),
    Mutant(
        "estimate/more nodes are as good as those one has",
        "for among in (options, [*options, more]):",
        "for among in ([more, *options],):",
        "estimate/test_plan.py -k more_nodes",
    ),
    Mutant(
        "estimate/times of a run that does not fit",
        "return found if plan.fits else found | dict.fromkeys(times)",
        "return found",
        "estimate/test_plan.py -k no_times",
    ),
    Mutant(
        "estimate/the closest is the first",
        "min(tried, key=lambda pair: pair[0], default=",
        "next(iter(tried), ",
        "estimate/test_plan.py -k comes_closest",
    ),
    Mutant(
        "estimate/no master copy",
        "state = 12 if ",
        "state = 8 if ",
        "estimate/test_memory_real.py -k bf16",
    ),
    Mutant(
        "estimate/every stage like the last",
        " / layout.vpp * chunks_in_flight(stage, layout, packs)",
        "",
        "estimate/test_stages.py",
    ),
    Mutant(
        "estimate/a backward pass as long as its forward pass",
        "backward += _product(setup, columns, inner, rows, written=8, tiled=tiled)",
        "pass",
        "estimate/test_stages.py",
    ),
    Mutant(
        "estimate/experts' state over as many ranks as the rest",
        "trained.experts / placement.expert_replica",
        "trained.experts / placement.replica",
        "estimate/test_experts.py",
    ),
    Mutant(
        "estimate/all tokens stay in their node",
        "(ranks - near) / ranks / gpu.network",
        "0.0",
        "estimate/test_experts.py",
    ),
    Mutant(
        "estimate/a proposal fills the GPU",
        "memory.total <= (1.0 - SPARE) * memory.room",
        "memory.total <= memory.room",
        "estimate/test_search.py -k room_to_spare",
    ),
    Mutant(
        "estimate/whole layers are never recomputed",
        '"full": forward}[setup.config.model.recompute]',
        '"full": Seconds()}[setup.config.model.recompute]',
        "estimate/test_experts.py -k busiest",
    ),
    Mutant(
        "estimate/virtual stages in one go",
        "(layout.vpp - 1) * interleaved_packs(packs, layout.pp) + 1",
        "1",
        "estimate/test_stages.py",
    ),
    Mutant(
        "estimate/nothing is hidden one step ahead",
        'seconds = max(phases["generation"] + phases["weight sync"], seconds - phases["generation"])',
        "seconds = seconds",
        "estimate/test_plan.py::test_one_step_ahead_hides_the_shorter_of_the_two",
    ),
    # Adapters.
    Mutant(
        "lora/an adapter's gradient stays in parts under sequence parallelism",
        "whole.sequence_parallel = self._sequence_parallel",
        "whole.sequence_parallel = False",
        "test_lora.py -k dense",
    ),
    Mutant(
        "lora/an expert's gradient stays in parts",
        "whole.added_over_expert = self._group.size() > 1",
        "whole.added_over_expert = False",
        "test_lora.py -k experts",
    ),
    Mutant(
        "lora/an expert's matrix counts once for each of its ranks in the norm",
        "whole.shared = self._group.rank() > 0",
        "whole.shared = False",
        "test_lora.py -k experts",
    ),
    Mutant(
        "lora/the reference keeps its adapters",
        "with adapters_off(self._adapted.chunks):",
        "with adapters_off([]):",
        "test_lora.py -k reference",
    ),
    Mutant(
        "lora/merged without its scale",
        "held.addmm_(b.float(), a.float(), alpha=self._scale)",
        "held.addmm_(b.float(), a.float())",
        "test_lora.py -k peft",
    ),
    Mutant(
        "lora/targets that SGLang would leave out are sent",
        "if targets & some and not targets >= needed:",
        "if targets & some and not targets:",
        "trainer/test_preflight_servers.py",
    ),
    # Smaller policies.
    Mutant(
        "compress/padding counts as activity",
        "(_precise(arguments[0]) * self._valid[..., None])",
        "(_precise(arguments[0]))",
        "compress/test_scores.py -k loops_over_sequences",
    ),
    Mutant(
        "compress/norms of sequences count as one",
        "self._norms[layer] += squares.sqrt().sum(0).cpu()",
        "self._norms[layer] += squares.sum(0).sqrt().cpu()",
        "compress/test_scores.py -k loops_over_sequences",
    ),
    Mutant(
        "compress/losses of prompts count",
        "states[batch.response[:, 1:]]",
        "states[batch.response[:, :-1]]",
        "compress/test_scores.py -k left_out",
    ),
    Mutant(
        "compress/over random halves no layer is present",
        "np.where(gone, costs[:, None], -costs[:, None])",
        "np.where(gone, costs[:, None], 0.0)",
        "compress/test_scores.py -k random_halves",
    ),
    Mutant(
        "compress/an engine is sent the layers that are absent",
        "weight.zero_()",
        "pass",
        "compress/test_asking.py",
    ),
    Mutant(
        "compress/layers that were absent once stay so",
        "weight.copy_(before)",
        "pass",
        "compress/test_asking.py",
    ),
    Mutant(
        "compress/what was removed before is there again",
        "gone = [*removed, layer]",
        "gone = [layer]",
        "compress/test_scores.py -k greedy",
    ),
    Mutant(
        "compress/the least needed stay",
        "key=lambda i: (-scores[i], i)",
        "key=lambda i: (scores[i], i)",
        "compress/test_scores.py -k useless",
    ),
    Mutant(
        "compress/columns of another order",
        "return block if columns is None else block[:, columns]",
        "return block if columns is None else block[:, : len(columns)]",
        "compress/test_command.py -k units",
    ),
    Mutant(
        "compress/rows of the first buffer alone",
        "rows[(rows >= top) & (rows < top + len(block))] - top",
        "rows[rows < len(block)]",
        "compress/test_surgery.py",
    ),
    Mutant(
        "compress/a layer's weights under its old number",
        "layer = cut.layers[int(parts[2])]",
        "layer = int(parts[2])",
        "compress/test_command.py -k layers",
    ),
    Mutant(
        "compress/query heads of another group",
        'for dimension, heads in (("queries", shape.heads // shape.kv_heads), ("keys", 1)):',
        'for dimension, heads in (("queries", 1), ("keys", 1)):',
        "compress/test_command.py -k heads",
    ),
    Mutant(
        "compress/experts under their old numbers",
        "parts[5] = str(cut.experts[layer][int(parts[5])])",
        "pass",
        "compress/test_surgery.py",
    ),
    Mutant(
        "compress/norms take their mean over channels that are gone",
        "scale = math.sqrt(whole / len(kept))",
        "scale = 1.0",
        "compress/test_command.py -k channels",
    ),
    Mutant(
        "compress/what routers did before a kill is lost",
        '            "experts": self._experts,\n            "choices": self._choices,\n',
        "",
        "compress/test_resume.py -k routers",
    ),
    Mutant(
        "compress/an expert counts as much in every token",
        "self._experts[layer].index_add_(0, experts, weights.double())",
        "self._experts[layer].index_add_(0, experts, torch.ones(len(weights), dtype=torch.float64))",
        "compress/test_scores.py -k router",
    ),
    Mutant(
        "compress/means of channels are over padding, too",
        ".sum(1) / self._valid.sum(1, keepdim=True)",
        ".mean(1)",
        "compress/test_scores.py -k loops_over_sequences",
    ),
    Mutant(
        "compress/shards: a sequence's mean is that of its part on a rank",
        "if self._stream_group is not None:  # a sequence's mean is of all its tokens",
        "if False:",
        "compress/test_layouts.py -k dense",
    ),
    Mutant(
        "compress/shards: routers choose of experts that are gone",
        "gating(states).masked_fill(gone, -torch.inf)",
        "gating(states)",
        "compress/test_layouts.py -k experts",
    ),
    Mutant(
        "compress/minitron leaves a number of groups that no layout divides",
        " if shape.kv_heads % count == 0]",
        "]",
        "compress/test_cut.py -k minitron",
    ),
    Mutant(
        "compress/attention of every layer goes by the share",
        "sparsity ** (ratio / 1.5)",
        "sparsity",
        "compress/test_cut.py",
    ),
    Mutant(
        "compress/shards: a sequence's norm is that of its part on a rank",
        "if self._group is not None:  # a sequence's norm is of all its tokens",
        "if False:",
        "compress/test_layouts.py -k dense",
    ),
    Mutant(
        "compress/shards: the first rank's tokens on every rank",
        "(each.chunk(tp)[self._world.tp_rank] for each in (sequence, last))",
        "(each.chunk(tp)[0] for each in (sequence, last))",
        "compress/test_layouts.py -k dense",
    ),
    Mutant(
        "compress/shards: tokens that several ranks have count each time",
        "return not self._sequence_parallel and self._world.tp_rank > 0",
        "return False",
        "compress/test_layouts.py -k dense",
    ),
    Mutant(
        "compress/shards: all units are the first rank's",
        "row.chunk(self._world.layout.tp)[tp_rank] if kind in cut else row",
        "row.chunk(self._world.layout.tp)[0] if kind in cut else row",
        "compress/test_layouts.py -k dense",
    ),
    Mutant(
        "compress/shards: the loss of one replica",
        'torch.stack(world.gather(mine["logprobs"])).sum(0)',
        'mine["logprobs"]',
        "compress/test_layouts.py -k experts",
    ),
    Mutant(
        "compress/refit: a layer is fitted as if those before it were as they were",
        "with as_cut(self.model, cut), self.applied(), watched(layers[layer])",
        "with as_cut(self.model, cut), watched(layers[layer])",
        "compress/test_refit.py -k left",
    ),
    Mutant(
        "compress/refit: padding is fitted, too",
        "seen[0][batch.valid][:, kept].double()",
        "seen[0].flatten(0, 1)[:, kept].double()",
        "compress/test_refit.py -k left",
    ),
    Mutant(
        "compress/refit: what the next norm takes away counts",
        "scale = 1 / target.norm(dim=-1, keepdim=True)",
        "scale = torch.ones_like(target[:, :1])",
        "compress/test_refit.py -k left",
    ),
    Mutant(
        "compress/refit: the layer before those that go stays as it was",
        "first = min(*(layer - 1 for layer in gone)",
        "first = min(*(layer for layer in gone)",
        "compress/test_refit.py -k first_change",
    ),
    Mutant(
        "compress/refit: units that go make the ridge smaller",
        "penalty = self.ridge * gram.diagonal().mean()",
        "penalty = self.ridge * gram.diagonal().sum() / self.shape.ffn",
        "compress/test_refit.py -k units_and_channels",
    ),
    Mutant(
        "compress/refit: channels that go are in the length of the stream",
        "scale = 1 / target.norm(dim=-1, keepdim=True)",
        "scale = 1 / larger[0][batch.valid].double().norm(dim=-1, keepdim=True)",
        "compress/test_refit.py -k units_and_channels",
    ),
    Mutant(
        "compress/refit: sums without an inverse are solved",
        "if not (gram.diagonal().sum() > 0 and squares > 0):",
        "if not squares > 0:",
        "compress/test_refit.py -k nothing_can_be_fitted",
    ),
    Mutant(
        "compress/refit: of no error a share is explained",
        "if not (gram.diagonal().sum() > 0 and squares > 0):",
        "if not gram.diagonal().sum() > 0:",
        "compress/test_refit.py -k nothing_can_be_fitted",
    ),
    Mutant(
        "compress/refit: fitted weights are compared as they were before they were rounded",
        "self.weights[layer] = fitted.to(self.dtype).to(weight)",
        "self.weights[layer] = fitted.to(weight)",
        "compress/test_refit.py -k written",
    ),
    Mutant(
        "compress/refit: the two losses are each other's",
        '"loss_after": reader.loss(), "loss_without_refit": after}',
        '"loss_after": after, "loss_without_refit": reader.loss()}',
        "compress/test_refit.py -k losses",
    ),
    Mutant(
        "compress/refit: progress is not told which layers are fitted",
        "passes.advance(0, to_do=refit.reads(cut) - of_fits)",
        "passes.advance(0)",
        "compress/test_refit.py -k written",
    ),
    Mutant(
        "report/frontier: a refit is another point of the same line",
        '(" refit" if row.get("refit") else "")',
        '""',
        "report/test_page.py -k refit",
    ),
    Mutant(
        "compress/refit: the larger policy's weights are written",
        "    if whole in fitted:",
        "    if whole in ():",
        "compress/test_refit.py -k written",
    ),
    Mutant(
        "compress/passes: one goes on without the sums of what it read",
        "        _fill(sums, kept)\n",
        "        pass\n",
        "compress/test_resume.py -k any_batch",
    ),
    Mutant(
        "compress/passes: those that were done are read again",
        "if number < len(self._finished):",
        "if False:",
        "compress/test_resume.py -k any_batch",
    ),
    Mutant(
        "compress/passes: sums of anything else will do",
        'if kept["asked"].get(name) != self._asked[name]}',
        "if False}",
        "compress/test_resume.py -k no_use",
    ),
    Mutant(
        "compress/passes: ranks go on from different places",
        "set.intersection(*places)",
        "set(found)",
        "compress/test_resume.py -k written_less",
    ),
    Mutant(
        "compress/passes: the sums before are overwritten",
        "self._slot, self._due = 1 - self._slot, time.monotonic()",
        "self._due = time.monotonic()",
        "compress/test_resume.py -k written_less",
    ),
    Mutant(
        "compress/passes: sums stay beside what was made of them",
        "    forget(chosen.out)\n    return 0\n",
        "    return 0\n",
        "compress/test_resume.py -k command_that",
    ),
    Mutant(
        "compress/law: squares where the law takes absolute values",
        "np.minimum(1.0, huber / np.maximum(np.abs(residual), 1e-300))",
        "np.ones_like(residual)",
        "compress/test_law.py -k wild_points",
    ),
    Mutant(
        "compress/law: constants in the units of the fit",
        "log = values[constant] + sum(values[exponent] * self.means[name]",
        "log = values[constant] - sum(values[exponent] * self.means[name]",
        "compress/test_law.py -k give_back",
    ),
    Mutant(
        "compress/law: the fit sees what is held out",
        "seen, unseen = points.take(~held), points.take(held)",
        "seen, unseen = points, points.take(held)",
        "compress/test_law.py -k held_out",
    ),
    Mutant(
        "compress/law: points drawn anew instead of curves",
        "np.concatenate([places[n] for n in rng.choice(numbers, len(numbers))])",
        "np.arange(len(points))",
        "compress/test_law.py -k intervals",
    ),
    Mutant(
        "compress/law: slopes over the first step",
        "apart.append(np.abs(np.diff(predicted[of]) - np.diff(points.loss[of])) / steps)",
        "apart.append(np.abs(np.diff(predicted[of]) - np.diff(points.loss[of])) / steps[0])",
        "compress/test_law.py -k slopes",
    ),
    Mutant(
        "compress/law: a token costs the same at any size",
        "time = (1 - grid) * (chosen.run_tokens + along)",
        "time = chosen.run_tokens + along",
        "compress/test_law.py -k foretells",
    ),
    Mutant(
        "compress/sweep: what was measured is measured again",
        'if "tokens_per_second" not in row and',
        "if True and",
        "compress/test_sweep.py -k again",
    ),
    Mutant(
        "compress/sweep: the whole policy is loaded in one process beside a layout",
        'if "tokens_per_second" not in row and self.chosen.layout is None:',
        'if "tokens_per_second" not in row and True:',
        "compress/test_sweep.py -k in_shards",
    ),
    Mutant(
        "compress/sweep: every budget is spent",
        'if recovery_tokens({**row, "recovered": fewer}, self._enough()) is not None:',
        "if False:",
        "compress/test_sweep.py -k least_budget",
    ),
    Mutant(
        "compress/sweep: rows of other sequences stand side by side",
        'if name != "settings" and record["asked"].get(name) != asked[name]]',
        "if False]",
        "compress/test_sweep.py -k other_sequences",
    ),
    Mutant(
        "compress/sweep: weights that were written again are the old ones",
        'seen.update(hashlib.file_digest(opened, "blake2b").digest())',
        "seen.update(file.name.encode())",
        "compress/test_sweep.py -k written_again",
    ),
    Mutant(
        "compress/sweep: sequences that were written again are the old ones",
        "seen.update(len(ids).to_bytes(8) + ids.tobytes())",
        "seen.update(len(ids).to_bytes(8))",
        "compress/test_sweep.py -k written_again",
    ),
    Mutant(
        "compress/sweep: a budget is not tried where a larger one was enough",
        'fewer = [point for point in recovered if point["steps"] < steps]',
        "fewer = recovered",
        "compress/test_sweep.py -k least_budget",
    ),
    Mutant(
        "compress/sweep: policies of another sweep that was killed are taken",
        "found.write()  # by what is asked",
        "pass  # by what is asked",
        "compress/test_sweep.py -k known_before",
    ),
    Mutant(
        "compress/sweep: a signal is a mistake of the user's",
        "if code == 2:",
        "if True:",
        "compress/test_sweep.py -k exit_code",
    ),
    Mutant(
        "estimate/a smaller width that no layout divides",
        "if count != before and count % ranks:",
        "if False:",
        "compress/test_sweep.py -k plan_refuses",
    ),
    Mutant(
        "compress/sweep: the best alone is on the frontier",
        'a >= -row["weights"] and b >= worth(row) and (a, b)',
        "b >= worth(row) and (a, b)",
        "compress/test_sweep.py -k frontier",
    ),
    Mutant(
        "compress/random attention is the first layers'",
        "highest(_random((shape.num_layers,), recipe.seed).tolist(), len(left.silenced))",
        "left.silenced",
        "compress/test_scores.py -k chance",
    ),
    Mutant(
        "estimate/a smaller policy is the whole one",
        "return make_plan(made.config, made.assumptions, left)",
        "return make_plan(made.config, made.assumptions)",
        "compress/test_sweep.py -k directory",
    ),
    Mutant(
        "data/what is stored does not depend on settings",
        "{name: getattr(data, name) for name in names}",
        "{name: None for name in names}",
        "data/test_stored.py",
    ),
    Mutant(
        "data/what is stored depends on the file's name",
        "[(file.suffix, file_digest(file)) for file in files]",
        "[(file.suffix, str(file)) for file in files]",
        "data/test_stored.py",
    ),
    Mutant(
        "data/what is stored does not depend on the tokenizer",
        "_hash_of_tokenizer(tokenizer), dict(depends_on)]",
        "dict(depends_on)]",
        "data/test_stored.py",
    ),
    Mutant(
        "data/nobody waits for what another process makes",
        "                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)\n                break",
        "                break",
        "data/test_stored.py",
    ),
    Mutant(
        "data/rows that were left out shift the others",
        "batch.values.take(kept)",
        "batch.values[: len(kept)]",
        "data/test_stored.py",
    ),
    Mutant(
        "data/ids begin anew with each source", "dataclasses.replace(prompt, id=index)", "prompt", "data/test_stored.py"
    ),
    Mutant(
        "order/sources without weights", "weight / sum(weights) for", "1.0 / len(weights) for", "data/test_order.py"
    ),
    Mutant("order/sources in one order", "Purpose.ORDER, self._number)", "Purpose.ORDER)", "data/test_order.py"),
    Mutant(
        "order/sources resume as the first", "source.go_to(*place)", "source.go_to(*places[0])", "data/test_order.py"
    ),
    Mutant("hub/a shard is missing", "all((folder / shard).is_file() for shard in shards)", "True", "test_hub.py"),
    Mutant(
        "ahead/aborted requests have the routing of others",
        "like[:0] if c.routing is None else c.routing for c in completions",
        "c.routing for c in completions if c.routing is not None",
        "rollout/test_in_flight.py -k broken_off",
    ),
    Mutant(
        "ahead/broken-off groups of any size",
        "if samples is not None and not (",
        "if False and not (",
        "rollout/test_in_flight.py -k broken_off",
    ),
    Mutant("hub/some of several files", "sets[name] == count for name", "True for name", "test_hub.py"),
    Mutant(
        "settings/the first type's error",
        'max(details, key=lambda each: len(each["loc"]))',
        "details[0]",
        "test_settings.py",
    ),
    Mutant(
        "pruning/prompts share a row",
        "1 + self._seen + np.arange(len(new))",
        "self._seen + np.arange(len(new))",
        "rl/pruning/test_prompt_table.py",
    ),
]


def places(text: str, package: Path) -> list[Path]:
    """The files of a package in which a text stands, once for each time."""
    return [file for file in sorted(package.rglob("*.py")) for _ in range(file.read_text().count(text))]


def outcomes(mutants: list[Mutant]) -> Iterator[tuple[Mutant, str, float]]:
    """Of each mutant ``caught``, ``survived``, ``gone`` or ``not run``, and the seconds that it took."""
    for module in IMPORTED:
        importlib.import_module(module)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = copied(Path(folder))
        for mutant in mutants:
            began = time.monotonic()
            yield mutant, outcome_of(mutant, copy), time.monotonic() - began


def copied(folder: Path) -> Path:
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    for stale in folder.rglob("__pycache__"):
        shutil.rmtree(stale)
    by_hash = py_compile.PycInvalidationMode.CHECKED_HASH  # a mutant may be made within the second of the last one
    compileall.compile_dir(str(folder), quiet=2, invalidation_mode=by_hash)
    return folder


def outcome_of(mutant: Mutant, copy: Path) -> str:
    """Make the mistake in a copy of the repository, run its tests, and take it back."""
    where = places(mutant.text, copy / PACKAGE)
    if len(where) != 1:
        return "gone"
    right = where[0].read_text()
    where[0].write_text(right.replace(mutant.text, mutant.instead))
    try:
        return {0: "survived", 1: "caught", None: "caught"}.get(exit_code(mutant.tests, copy), "not run")
    finally:
        where[0].write_text(right)


def exit_code(tests: str, copy: Path) -> int | None:
    """Of pytest, which a fork of this process runs; None where it did not end."""
    words = [f"tests/{word}" if ".py" in word else word for word in tests.split()]
    process = multiprocessing.get_context("fork").Process(target=run_tests, args=(words, copy))
    process.start()
    process.join(TIMEOUT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()
    return None if process.exitcode == -signal.SIGKILL else process.exitcode


def run_tests(words: list[str], copy: Path) -> None:
    """In a fork, with the copy in the place of the package."""
    os.setsid()
    os.chdir(copy)
    os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "RANKS_ARE": "fork"}
    sys.dont_write_bytecode = True
    sys.path[:] = [str(copy), *(path for path in sys.path if Path(path).resolve() not in (ROOT, ROOT / "tests"))]
    for number in (1, 2):
        os.dup2(os.open(copy / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    # A failure is enough: to make it small takes hypothesis half a minute.
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("mutants", phases=phases, derandomize=True)
    hypothesis.settings.load_profile("mutants")
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *words])
    sys.stdout.flush()
    os._exit(code)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", metavar="TEXT", default="", help="those whose name has this text in it")
    parser.add_argument("--json", action="store_true", help="print one object at the end, and nothing else")
    parser.add_argument("--unchanged", action="store_true", help="make no mistake: all of them have to survive")
    options = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if options.only in mutant.name]
    if options.unchanged:
        chosen = [*{mutant.tests: mutant._replace(instead=mutant.text) for mutant in chosen}.values()]
    found: dict[str, str] = {}
    began = time.monotonic()
    for mutant, outcome, seconds in outcomes(chosen):
        found[mutant.name] = outcome
        if not options.json:
            print(f"{outcome:9}{seconds:6.1f} s  {mutant.name}", flush=True)
    others = {name: outcome for name, outcome in found.items() if outcome != "caught"}
    caught, seconds = len(found) - len(others), time.monotonic() - began
    if options.json:
        print(json.dumps({"caught": caught, "total": len(found), "seconds": round(seconds), "others": others}))
    else:
        print(*(f"{outcome}: {name}" for name, outcome in others.items()), sep="\n")
        print(f"{caught} of {len(found)} mutants were caught, in {seconds:.0f} s")
    return int(bool(others))


if __name__ == "__main__":
    sys.exit(main())
