"""The meanings of metrics: the reference page (docs/metrics.md) is written from this table.

A name in the table may have placeholders: `reward/<part>` stands for `reward/environment`,
`reward/judge` and so on.
"""

import re
from collections.abc import Mapping
from functools import cache

MEANINGS: Mapping[str, Mapping[str, str]] = {
    "Rollouts: the episodes that the step was trained on": {
        "reward": "Mean score of the trajectories.",
        "reward_std": "Standard deviation of the scores. Without any, there is nothing to learn.",
        "reward/<part>": (
            "Mean of one part of the reward, unweighted, or of a part of it (`reward/judge/clear`)."
        ),
        "reward_std/<part>": "Standard deviation of that part.",
        "success": (
            "Share of successful episodes, by the environment's verdict or else the reward's"
            " (docs/rewards.md)."
        ),
        "turns": "Mean turns of an episode.",
        "sampled_tokens": "Tokens that the engine sampled.",
        "prompt_tokens": (
            "Tokens of the prompts, each counted once: of a turn only what is new since the turn"
            " before."
        ),
        "forked_share": "Share of the turns after the first that forked.",
        "forked_turns": (
            "Turns whose prompt does not continue the tokens of the turn before: a new sample"
            " begins."
        ),
        "reasoning/tokens": (
            "Sampled tokens of reasoning, without its marks. Only where there is any."
        ),
        "reasoning/cut": (
            "Share of answers that were cut within their reasoning. Only where there is any."
        ),
        "calls/per_row": (
            "Calls of programs (`env: agent:...`) for each training sample. 1: no call extends"
            " another."
        ),
        "calls/dropped_tokens": (
            "Sampled tokens in no sample: no program saw them, or another model was asked."
        ),
        "calls/<kind>": (
            "Share of the calls of a kind: `extension`, `branch`, `subagent` and others"
            " (docs/gateway.md)."
        ),
        "cut_answers": (
            "Share of answers cut at `rollout.sampling.max_tokens`, or at the end of the context."
        ),
        "segments": (
            "Parts of episodes that go on, in the batch (`rollout.staleness_rule=segment`). Only if"
            " any."
        ),
        "truncated": "Share of episodes that were cut off, mostly at a limit of `rollout.budget`.",
        "masked": (
            "Share of the episodes in the batch of which no token carried a loss: the fate"
            " `masked`."
        ),
        "masked_tokens": (
            "Share of the batch's sampled tokens, not trained on before, that carried no loss."
        ),
        "informative_groups": (
            "Share of groups that are trained on, with `batch_processing.keep_variance` below 1."
        ),
        "mixed_groups": (
            "Share of groups whose members scored differently, by more than rounding. Only these "
            "teach anything, if whole rewards are compared."
        ),
        "same_answers": (
            "Share of episodes whose answers are those of the commonest, of at least 4 tasks. Near"
            " 1 where the policy says the same whatever it is asked."
        ),
        "different_starts": (
            "Share of groups whose members began with different prompts. Above 0, an environment "
            "ignores its seed, and members are compared that had different tasks."
        ),
        "agents/<agent>/reward": "Mean score of one agent, where the environment names several.",
        "agents/<agent>/success": "Share of its successful episodes.",
        "agents/<agent>/turns": "Its mean turns.",
        "envs/<env>/<metric>": (
            "The same of one environment of a mixture: `reward`, `success` with its interval over"
            " tasks, `turns`, `tokens`."
        ),
        "envs/<env>/groups": "Its groups in the batch.",
        "envs/<env>/episodes": "Its episodes in the batch.",
        "curriculum/<level>/success": (
            "Success rate of one level of the curriculum `levels`, over its last groups."
        ),
        "curriculum/turns_left": (
            "Turns before the end of a recorded episode at which the earliest tasks of the"
            " curriculum `backplay` begin."
        ),
        "curriculum/success": "Success rate of those tasks, over the last groups.",
        "curriculum/easy": "Share of the rows that the curriculum `pools` has found easy.",
        "curriculum/hard": "Share of the rows that it has found hard.",
        "bias/seconds": (
            "Mean duration of trained episodes / of all; those that were cut would have been longer"
            " (Kaplan and Meier). Below 1, long episodes are missing."
        ),
        "bias/tokens": (
            "The same of lengths in tokens, without those of an answer that was cut short."
        ),
        "wasted_tokens": (
            "Tokens since the last step that are not trained on, without answers that were cut"
            " short."
        ),
        "wasted_tokens/<why>": (
            "Those of `failed` episodes, `surplus` members, `stale` or `filtered` groups, and of"
            " `preempted` episodes."
        ),
        "wasted_share": "Wasted tokens / (wasted tokens + tokens of the batch).",
        "generated_tokens": (
            "All tokens that the engines sampled since the last step, those for later steps"
            " included."
        ),
        "older_kv_tokens": (
            "Tokens since the last step that were sampled over KV of older weights than their own"
            " (`engine.kv_on_update`); vLLM's count when their answer ends. Their logprobs are"
            " those that they were sampled with, of weights of several versions. Only if any."
        ),
        "failed_tasks": "Tasks of the run so far that failed after all retries.",
    },
    "Staleness": {
        "stale_tokens": (
            "Share of the tokens that are too old to carry loss (rules `mask`, `segment`). Only if"
            " any."
        ),
        "staleness/max": "Age of the oldest trained token, in weight versions.",
        "staleness/mean": "Mean age of the trained tokens, in weight versions.",
        "staleness/groups/<age>": "Share of the groups whose oldest token has this age.",
        "staleness/tokens/<age>": "Share of the tokens of this age.",
    },
    "Training": {
        "loss": (
            "Sum of the token losses / the algorithm's normalizer. In policy gradients its value"
            " says little."
        ),
        "grad_norm": "Norm of the gradient before clipping: the largest of the step's minibatches.",
        "grad_norm/embedding": (
            "The same of the embeddings alone (with a tied head). Not with `trainer: deepspeed`."
        ),
        "grad_norm/blocks/<quarter>": (
            "The same of a quarter of the blocks, 1 to 4 from the embeddings on."
        ),
        "grad_norm/head": (
            "The same of what follows the blocks: the last norm, an untied head, a critic's head."
        ),
        "lr": "Learning rate.",
        "loss_tokens": "Tokens that carry a loss.",
        "tokens": "Tokens of the batch's samples, prompts included.",
        "tokens_computed": (
            "Those that went through the model: a prefix that samples share, as members and"
            " branches do, is computed once. `tokens` - `tokens_computed` is what that saves."
        ),
        "lockstep_ratio": (
            "Several ranks: how many times as long the step takes as with the same work on each"
            " rank at all times. The ranks wait for the slowest of them in every micro-batch."
        ),
        "logprob_gap_mean": (
            "Mean |logprob of the engine - logprob of the trainer| of a sampled token, in nats."
        ),
        "logprob_gap_max": "The largest such difference.",
        "router_aux_loss": (
            "How unequally the experts are used, without its weight"
            " (`trainer.router_aux_loss_coef`)."
        ),
        "routing_difference": (
            "Share of the engine's experts that the trainer's routers would not have chosen"
            " (`trainer.routing`)."
        ),
        "routing_known": (
            "Share of the loss tokens whose experts the engine has reported (`trainer.routing`)."
        ),
        "ratio": "Mean of exp(logprob - old logprob).",
        "clipped_low": "Share of the tokens whose gradient the lower clip cut.",
        "clipped_high": "Share of the tokens whose gradient the upper clip cut.",
        "clipped_dual": "Share of the tokens whose gradient `algorithm.dual_clip` cut.",
        "weight_clipped_low": (
            "Share of the tokens whose weight `cispo` has raised to its lower clip."
        ),
        "weight_clipped_high": (
            "Share of the tokens whose weight `cispo` has cut to its upper clip."
        ),
        "kl": (
            "KL divergence of old from new policy per token, in nats (k3). 0 in a step's first"
            " minibatch."
        ),
        "reference_kl": (
            "KL divergence of the policy from the reference model, per token (k3 estimate), in"
            " nats."
        ),
        "entropy": (
            "Mean of -logprob of the sampled tokens: the policy's entropy per token, in nats."
        ),
        "policy_entropy": (
            "The same exactly, over all tokens that could be sampled (with"
            " `algorithm.entropy_bonus`)."
        ),
        "importance_weight": (
            "Mean of exp(old logprob - engine's logprob), before the cap; with "
            "`algorithm.importance_level=sequence`, the product over the sample."
        ),
        "importance_truncated": (
            "Share of the tokens whose importance weight was above the cap or below the floor."
        ),
        "nll": "Mean negative log-likelihood of a token that is imitated, in nats.",
        "constraints/rate/<part>": (
            "Mean cost of a constraint in the batch (`batch_processing.constraints`)."
        ),
        "constraints/multiplier/<part>": "The constraint's Lagrange multiplier.",
        "demonstrations/loss": "Nats a token at the end of the imitation of a scripted player.",
        "recordings/loss": "Nats a token at the end of the imitation of recordings.",
        "demonstrations/success": (
            "Share of the scripted player's episodes that succeeded, before the first step."
        ),
        "accuracy": (
            "Recipes that learn from pairs: share of the pairs in the right order, before the"
            " update."
        ),
        "preference_loss": "Recipes `dpo` and `iterative_dpo`: mean loss of a pair, in nats.",
        "margin": (
            "The same recipes: beta times how much likelier the chosen half became than the"
            " rejected one."
        ),
        "pairs": "`recipe: iterative_dpo`: pairs of the iteration.",
        "groups_without_pairs": (
            "The same: share of its groups whose members all earned the same. They give no pair."
        ),
        "updates": (
            "The same: updates of the optimizer in the iteration. Other metrics are means over"
            " them."
        ),
    },
    "Health: signs that learning goes wrong before the reward shows it": {
        "health/effective_sample_size": (
            "(sum w)^2 / (N sum w^2) of the weights w = exp(old logprob - engine's)."
        ),
        "health/ratio_p1": (
            "1st percentile of exp(logprob - old logprob): how far the step lowers a token."
        ),
        "health/ratio_p99": "99th percentile of it: how far the step raises a token.",
        "health/logprob_gap/<age>": (
            "Mean |logprob of the engine - logprob of the trainer before the step| of the tokens"
            " that were sampled so many versions ago. At age 0 both have the same weights: a gap"
            " there says that an update did not arrive, or that the two programs differ."
        ),
        "health/advantage_std": "Standard deviation of the advantages of the loss tokens.",
        "health/advantage_positive": "Share of the loss tokens with an advantage above 0.",
        "health/length_correlation": "Correlation of an episode's score and its sampled tokens.",
        "health/reward_by_length/<quarter>": (
            "Mean score of a quarter of the episodes, 1 to 4 from the shortest on."
        ),
        "health/repetition": (
            "Share of passages of 8 tokens that stood in the same answer before; not there if"
            " answers of 16 tokens or more have less than a tenth of all tokens."
        ),
        "health/disagreement": (
            "Share of the pairs of members that two parts of the reward order differently."
        ),
    },
    "The critic (`algorithm: ppo`)": {
        "critic/explained_variance": (
            "1 - Var(return - value) / Var(return): 1 is perfect, 0 as good as the mean."
        ),
        "critic/value": "Mean value of a token, before the step.",
        "critic/return": "Mean return of a token: what the critic learns.",
        "critic/earlier_episodes": (
            "`recipe: archer`: earlier trajectories in the first of the critic's updates."
        ),
        "critic/value_clipped": "Share of the tokens whose value the clip held back.",
        "critic/grad_norm/<part>": (
            "The norm of the critic's gradient by group of layers, as above."
        ),
        "critic/<metric>": "The critic's own training metrics, as above.",
    },
    (
        "Exact metrics of the policy before the step "
        "(environments that can be enumerated: docs/oracles.md)"
    ): {
        "exact/return": (
            "Mean return of the policy, undiscounted: every conversation is weighted by its"
            " probability."
        ),
        "exact/best_return": "The same of the best policy that sees the whole conversation.",
        "exact/regret": "Their difference.",
        "exact/other": (
            "`env: oracle`: probability that an episode ends by a message that is no offered word."
        ),
        "exact/respelled": (
            "Largest probability of an answer in other tokens than its usual ones: what is inexact."
        ),
        "exact/advantage_cosine": (
            "Cosine of the trained advantages and the exact ones, over loss tokens. 1 is best."
        ),
        "exact/advantage_residual": "Norm of their difference / norm of the exact ones. 0 is best.",
        "exact/value_error": (
            "Root mean square of (critic's value - exact value) where turns begin, after its"
            " lesson."
        ),
        "exact/exploitability": (
            "`kuhn_poker`: what a best response would win from the policy, in chips a hand."
        ),
        "exact/first_player_value": (
            "`kuhn_poker`: what the first player wins when the policy plays both; best: -1/18."
        ),
        "exact/legal": (
            "`kuhn_poker`: probability of a legal word, by how often each situation comes up."
        ),
    },
    "Self-play (`recipe: self_play`, `algorithm: rae`)": {
        "opponents/share": "Share of the trajectories that were played against an earlier version.",
        "opponents/success": "Share of these that the policy won.",
        "opponents/<version>/<agent>/success": (
            "The same, by the opponent's version and the policy's seat."
        ),
        "opponents/<version>/<agent>/episodes": "How many there were.",
        "baseline/<part>": (
            "Running mean of the returns of an environment's role, or of an environment."
        ),
        "envs/<env>/baseline/<part>": (
            "The same in a mixture, where it has settings of the algorithm of its own."
        ),
    },
    "Evaluation": {
        "eval/success": (
            "Share of successful held-out episodes; NaN if nothing tells which these are."
        ),
        "eval/success_low": (
            "Lower end of its 95 % confidence interval over tasks (Wilson): of 200 episodes, some 6"
            " points lower."
        ),
        "eval/success_high": "Upper end of that interval.",
        "eval/reward": "Mean score of the held-out episodes.",
        "eval/reward_error": "Standard error of that mean, over tasks.",
        "eval/turns": "Mean turns of a held-out episode.",
        "eval/episodes": "Held-out episodes that came to an end.",
        "eval/failed": "Held-out episodes that failed. They are not averaged in.",
        "eval/same_answers": "Share of them whose answers are those of the commonest.",
        "eval/agents/<agent>/<metric>": "The same of one agent.",
        "eval/<suite>/same_answers": (
            "Share of its episodes whose answers are those of the commonest."
        ),
        "eval/<suite>/success": (
            "Share of successful episodes of a suite (`evaluation.suites`), over its tasks."
        ),
        "eval/<suite>/pass@<k>": (
            "Share of its tasks of which one of k answers succeeds, without bias."
        ),
        "eval/<suite>/pass_tasks": (
            "The tasks of all `pass@k`: enough of their answers are known for the largest k, of one"
            " agent at least. Of several, the mean counts."
        ),
        "eval/<suite>/reward": "Mean score over its tasks.",
        "eval/<suite>/<metric>_low": "Lower end of the 95 % interval, over tasks.",
        "eval/<suite>/<metric>_high": "Upper end of it.",
        "eval/<suite>/turns": "Mean turns of its episodes.",
        "eval/<suite>/tasks": "Its tasks of which an episode ended.",
        "eval/<suite>/episodes": "Its episodes that ended.",
        "eval/<suite>/failed": "Its episodes that failed. They are not averaged in.",
        "eval/envs/<env>/<metric>": "The same of one environment of a mixture.",
        "eval/preference_accuracy": (
            "Recipes `reward_model` and `dpo`: share of held-out pairs in the right order."
        ),
    },
    "Time": {
        "seconds": "Seconds of the whole step.",
        "seconds/<phase>": (
            "Seconds of its phases: `rollout` (waiting for episodes), `train`, `weights`."
        ),
        "seconds_<phase>": (
            "Seconds of the trainer's first rank: `old_logprobs`, `forward_backward`, `optimizer`."
        ),
        "tokens_per_second": "Sampled and prompt tokens of the step / its seconds.",
        "blocked_seconds": "Seconds so far in which the trainer waited for episodes.",
        "groups/playing": "Groups of which an episode is played or scored when the step ends.",
        "groups/ready": "Finished groups that wait for a later step.",
        "channels/<name>/depth": (
            "Finished groups in the channel from the episodes to the trainer, when the step ends."
        ),
        "channels/<name>/capacity": "How many fit into it.",
        "channels/<name>/put_wait": "Seconds so far that episodes waited for room in it.",
        "channels/<name>/get_wait": "Seconds so far that the trainer waited for a group from it.",
        "live_episodes": "Episode slots in use.",
        "live_episodes/limit": (
            "Episode slots: the present limit, by the load of the engines and by what their KV"
            " caches hold."
        ),
        "live_episodes/tokens": (
            "Tokens of the contexts of live episodes, evaluations at the same time included. This"
            " and the next three are there if the engines tell how many tokens their KV caches"
            " hold."
        ),
        "live_episodes/tokens_limit": "Tokens that the KV caches of all engines hold.",
        "live_episodes/tokens_each": (
            "Tokens that one more episode is expected to hold at most: what earlier ones held after"
            " a turn x the share of them that came so far."
        ),
        "live_episodes/preempted": (
            "Episodes that were broken off since the last step because the contexts of all exceeded"
            " the KV caches. Each is played again."
        ),
        "envs/<env>/tokens_each": "`live_episodes/tokens_each` of one environment of a mixture.",
        "envs/suite/<suite>/tokens_each": "The same of a suite that is played on the same engines.",
        "speculation/accepted": (
            "Share of the tokens proposed by speculative decoding (`engine.speculative`) that the"
            " model accepted, since the last step. What is sampled does not depend on it; where it"
            " is low, proposals cost more than they save."
        ),
        "prefix_cache/found": (
            "Share of the tokens of prompts that the engines found in their caches since the last"
            " step, and did not compute: earlier turns, and beginnings that members and branches"
            " share. There once an engine has told of any."
        ),
        "workers/<role>": (
            "Workers of a role that are alive when the step ends. `engine`: the engines that serve"
            " the policy, whose number `agentrl engines add RUN` changes."
        ),
        "restarts/<role>": (
            "How often workers of a role were started again since this launch; `rules`: processes."
        ),
        "set_aside/<role>": (
            "Requests that two of them died of: they count as failed, and are not tried again."
        ),
        "rollout_workers/cores": (
            "Cores that the rollout workers have used since the last step, all together; their"
            " environments' own processes are not counted. Only with `rollout.workers`."
        ),
        "rollout_workers/busy": (
            "The share of the time since the last step in which the event loop of a rollout worker"
            " was busy, on average. Near 1, episodes wait for each other's turns: more workers"
            " help. `rollout.workers={min: N, max: M}` keeps it near 0.6."
        ),
        "rollout_workers/most_live": "Episodes that the busiest of them plays.",
        "rollout_workers/lost_episodes": (
            "Episodes that failed since the last step because their worker died."
        ),
        "loop/longest_gap_seconds": (
            "The longest time that the controller's event loop was blocked."
        ),
        "loop/longest_engine_seconds": (
            "The longest time that an engine computed on the event loop (`engine: local`)."
        ),
        "weights/bytes": (
            "Bytes of the published weights with the headers of their files, or the sums of their"
            " buckets; 0 by `direct`. Plans count the weights alone."
        ),
        "weights/attempts": "Attempts that publishing took.",
        "weights/seconds_<phase>": "Seconds to `write`, `stage` and `commit` the weights.",
    },
    "Scoring: the work of judges and reward models": {
        "scoring/<part>/answers": "Requests that the judge answered since the last step.",
        "scoring/<part>/cached": "Verdicts that came from the cache.",
        "scoring/<part>/busy": "Requests that the endpoint refused because it was busy.",
        "scoring/<part>/unreachable": "Requests without an answer.",
        "scoring/<part>/unreadable": "Answers that were no verdict.",
        "scoring/<part>/prompt_tokens": "Tokens that the judge read.",
        "scoring/<part>/completion_tokens": "Tokens that the judge wrote.",
        "scoring/<part>/cost": "What they cost, by the prices in the settings.",
        "scoring/<part>/total_cost": "The cost of the run so far.",
        "scoring/<part>/latency_mean": "Mean seconds of an answer.",
        "scoring/<part>/latency_max": "The longest one.",
        "scoring/<part>/swayed_by_order": (
            "Share of the pairs that were judged differently in the other order."
        ),
        "scoring/<part>/sandboxes_lost": (
            "Sandboxes that were lost in runs of programs so far, and replaced."
        ),
        "scoring/<part>/scored": "Trajectories that the reward model scored.",
        "scoring/<part>/batch_mean": "How many of them it scored at once, on average.",
    },
}
"""By topic: names of metrics, and what they mean."""


def meaning_of(name: str) -> str | None:
    """The meaning of a metric; None for one that is not in the table."""
    if name in _exact():
        return _exact()[name]
    return next((meaning for pattern, meaning in _patterns() if pattern.fullmatch(name)), None)


@cache
def _exact() -> Mapping[str, str]:
    return {name: meaning for topic in MEANINGS.values() for name, meaning in topic.items()}


@cache
def _patterns() -> tuple[tuple[re.Pattern[str], str], ...]:
    """The names with placeholders. A part of a reward may have parts of its own:
    `reward/code/all_passed`.
    """
    written = {name: name.replace("<part>", ".+") for name in _exact() if "<" in name}
    return tuple(
        (re.compile(re.sub(r"<\w+>", "[^/]+", form)), _exact()[name])
        for name, form in written.items()
    )
