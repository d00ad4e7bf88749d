"""The configuration: frozen, typed, strict; every key's one default and explanation stand here.

pydantic does the typing; `config_load` reads YAML files and command lines into `Config`.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from vcppo_jax.config_checks import CHECKS
from vcppo_jax.config_mesh import MeshSection
from vcppo_jax.config_objective import (
    AlgorithmSection,
    NonNegative,
    Positive,
    RewardSection,
    RolloutSection,
    Section,
)

Phase = Literal["sft", "reward", "value", "rl", "evaluate"]
PHASES = get_args(Phase)


class ModelSection(Section):
    """The policy."""

    path: str = Field(
        description="Hugging Face directory of the policy (Qwen2/2.5, Qwen3 or Llama), a phase of another "
        "run (runs/x/rl), or builtin:tiny, the small model that the package ships."
    )
    init: Literal["pretrained", "random"] = Field(
        "pretrained",
        description="pretrained reads the weights; random reads config.json alone and draws new ones.",
    )
    compute_dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="Type of the matmuls. Master weights and optimizer states are float32 always."
    )
    remat: Literal["none", "full", "dots"] = Field(
        "full",
        description="What the backward pass computes again: none keeps all activations, full keeps one "
        "per layer, dots keeps the results of the matmuls.",
    )
    attention: Literal["auto", "blocked", "cudnn", "splash"] = Field(
        "auto",
        description="Kernel of training, scoring and prefill; none holds [T, T] scores. auto: splash on TPU, "
        "cudnn on NVIDIA GPUs where it can compute (bfloat16; rows are packed, so Hopper or newer), else "
        "blocked, which runs everywhere.",
    )


class ValueModelSection(Section):
    """The value model: a network of its own, which may be smaller than the policy."""

    init: Literal["policy", "reward_model", "checkpoint"] = Field(
        "policy",
        description="Where the value model starts: policy (the policy's weights, a new head), "
        "reward_model (the Hugging Face directory value_model.path; the log says whether a "
        "head was found), checkpoint (a checkpoint of value-pretraining or RL at "
        "value_model.path). When `phases` lists value, this is where that phase starts, and "
        "RL starts from it.",
    )
    path: str | None = Field(
        None,
        description="For reward_model: a Hugging Face directory. For checkpoint: runs/x/value, or one "
        "step of it, runs/x/value/checkpoints/STEP.",
    )
    step: Positive | None = Field(
        None,
        description="Which checkpoint of this run's value phase RL starts from, one of "
        "value.checkpoint_steps; the last one when null.",
    )
    head_bias: bool = Field(
        False, description="Whether a new scalar head has a bias (a loaded one keeps its own)."
    )


class TaskSection(Section):
    """The built-in tasks, used where data.train is task:running_sum or task:alternating_sum."""

    digits: Annotated[int, Field(ge=2)] = Field(
        12, description="running_sum: digits per problem; the chain of thought has one step per digit."
    )
    additions: Annotated[int, Field(ge=1, le=90)] = Field(
        24, description="alternating_sum: additions per problem, from this to nine more; four tokens each."
    )
    early_exit_hazard: float = Field(
        0.03, ge=0, le=1, description="Cold start: chance per step that a demonstration stops and guesses."
    )
    step_error_rate: float = Field(
        0.2, ge=0, le=1, description="Cold start: chance per step that a demonstration adds wrongly."
    )
    train_problems: Positive = Field(20_000, description="Problems to train on.")
    demonstrations: Positive = Field(6_000, description="Demonstrations for the cold start.")
    validation_problems: Positive = Field(
        512, description="Held-out problems, disjoint from the training ones."
    )


class DataSection(Section):
    """Prompts with gold answers."""

    train: str = Field(
        description="JSONL or parquet file with prompt/problem/question (text or messages) and "
        "answer/label/ground_truth, or a built-in task: task:running_sum, "
        "task:alternating_sum."
    )
    validation: str | None = Field(
        None,
        description="Held-out file of the same form (several: comma-separated). The built-in task has its "
        "own.",
    )
    max_prompt_tokens: Positive = Field(1024, description="Longer prompts are counted and dropped at load.")
    system_prompt: str | None = Field(
        None, description="System message put before every prompt that has none."
    )
    task: TaskSection = TaskSection()


class OptimizerSection(Section):
    """AdamW with clipping by global norm and a skip of non-finite updates."""

    learning_rate: float = Field(gt=0, description="Peak learning rate.")
    warmup_steps: NonNegative = Field(
        0,
        description="Updates of linear warm-up; the first one has peak / warmup_steps. Training with fewer "
        "updates does not come to the peak.",
    )
    schedule: Literal["constant", "cosine", "linear"] = Field(
        "constant", description="After the warm-up: constant, or down to 0 at the last update."
    )
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay on matrices.")
    beta1: float = Field(0.9, ge=0, lt=1, description="Adam's first moment.")
    beta2: float = Field(0.999, ge=0, lt=1, description="Adam's second moment.")
    eps: float = Field(1e-8, gt=0, description="Adam's epsilon.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are clipped to this global norm.")
    epochs: Positive = Field(1, description="Passes over each rollout batch (over the data, in sft).")


class ActorSection(OptimizerSection):
    """Optimisation of the policy in RL."""

    learning_rate: float = Field(1e-6, gt=0, description="Peak learning rate (VC-PPO: 1e-6).")


class CriticSection(OptimizerSection):
    """Optimisation of the value model, in value-pretraining and in RL."""

    learning_rate: float = Field(2e-6, gt=0, description="Peak learning rate (VC-PPO: 2e-6).")


class SFTSection(OptimizerSection):
    """Supervised cold start on demonstrations."""

    learning_rate: float = Field(1e-5, gt=0, description="Peak learning rate.")
    data: str | None = Field(
        None, description="File with a prompt and a response per line; the built-in task writes its own."
    )
    batch_size: Positive = Field(64, description="Demonstrations per update.")
    steps: Positive | None = Field(None, description="Updates; when null, sft.epochs passes over the data.")


class RewardModelSection(OptimizerSection):
    """Training of a reward model on pairs of responses (Bradley-Terry)."""

    learning_rate: float = Field(1e-5, gt=0, description="Peak learning rate.")
    data: str | None = Field(
        None,
        description="File with a prompt, a chosen and a rejected response per line; the built-in task "
        "writes its own.",
    )
    batch_size: Positive = Field(64, description="Pairs per update.")
    steps: Positive | None = Field(
        None, description="Updates; when null, reward_model.epochs passes over the data."
    )
    held_out_share: float = Field(
        0.1, gt=0, lt=1, description="Share of the pairs that is kept back to measure accuracy on."
    )


class ValueSection(Section):
    """Value-pretraining: the policy frozen, fresh samples each step, lambda 1."""

    steps: Positive = Field(100, description="Most rollout steps. One step is several updates.")
    prompts_per_step: Positive = Field(512, description="Prompts sampled each step.")
    mini_batch_size: Positive = Field(512, description="Samples per update.")
    learning_rate: float | None = Field(
        None, gt=0, description="Learning rate of value-pretraining; critic.learning_rate when null."
    )
    settle: bool = Field(
        False,
        description="Stop before value.steps once value loss and explained variance on held-out rollouts "
        "settle.",
    )
    settle_window: Annotated[int, Field(ge=2)] = Field(
        10,
        description="Settled: over the last so many held-out measurements, neither improved on the "
        "earlier best by more than its tolerance.",
    )
    settle_loss_tolerance: float = Field(
        0.01, gt=0, description="Relative improvement of the value loss that counts."
    )
    settle_variance_tolerance: float = Field(
        0.01, gt=0, description="Absolute improvement of the explained variance that counts."
    )
    held_out_prompts: Positive = Field(256, description="Prompts of the held-out rollouts, sampled once.")
    held_out_every: Positive = Field(1, description="Steps between measurements on the held-out rollouts.")
    checkpoint_steps: tuple[Positive, ...] = Field(
        (),
        description="Steps whose checkpoints are kept for ever; each can start RL. Those after the last step "
        "are passed over.",
    )


class RLSection(Section):
    """The RL loop."""

    steps: Positive = Field(100, description="Rollout steps. One step is several updates.")
    prompts_per_step: Positive = Field(512, description="Prompts sampled each step.")
    mini_batch_size: Positive = Field(512, description="Samples (not prompts) per update.")
    evaluate_every: NonNegative = Field(
        0,
        description="Steps between evaluations on held-out problems; 0 evaluates only in the evaluate phase.",
    )
    critic_warmup_steps: NonNegative = Field(
        0, description="In the first so many steps only the value model is updated."
    )
    dynamic_sampling: bool = Field(
        False,
        description="DAPO: drop prompts whose samples are all right or all wrong and sample others in "
        "their place.",
    )
    dynamic_sampling_rounds: Positive = Field(
        10,
        description="Most rounds of sampling per step; what then lacks is filled up with dropped prompts.",
    )


class TrainSection(Section):
    """How batches are cut for the device; no result depends on these."""

    row_tokens: Positive | None = Field(
        None,
        description="Length of the rows that sequences are packed into; the longest possible sequence "
        "when null.",
    )
    micro_batch_tokens: Positive = Field(
        16_384, description="Token budget of one forward and backward pass over the whole mesh."
    )
    max_skipped_updates: Positive = Field(
        10, description="So many updates in a row with a loss or gradient that is not finite end the run."
    )


class EvaluateSection(Section):
    """Evaluation on held-out problems."""

    samples_per_prompt: Positive = Field(
        1, description="Samples per problem: mean@k and best@k are over them."
    )
    max_prompts: Positive | None = Field(None, description="At most so many problems per source.")
    temperature: float = Field(1.0, ge=0, description="Sampling temperature; 0 is greedy.")
    top_k: NonNegative = Field(0, description="As rollout.top_k.")
    top_p: float = Field(0.7, gt=0, le=1, description="As rollout.top_p (0.7 in the papers).")
    min_p: float = Field(0.0, ge=0, lt=1, description="As rollout.min_p.")
    max_new_tokens: Positive | None = Field(
        None, description="Length limit; rollout.max_new_tokens when null."
    )


class GradeSection(Section):
    """`vcppo evaluate --grade`: the training prompts by difficulty."""

    samples_per_prompt: Positive = Field(8, description="Samples per prompt, as in a rollout of RL.")
    easy_from: float = Field(0.75, ge=0, le=1, description="Prompts with at least this pass rate are easy.")
    hard_to: float = Field(0.25, ge=0, le=1, description="Prompts with at most this pass rate are hard.")

    @model_validator(mode="after")
    def _order(self) -> GradeSection:
        if self.hard_to >= self.easy_from:
            raise ValueError("grade.hard_to must be less than grade.easy_from")
        return self


class CheckpointSection(Section):
    """Checkpoints of training states."""

    every: Positive = Field(10, description="Steps between checkpoints. The last step is saved always.")
    keep_last: Positive = Field(2, description="So many of the newest are kept.")
    keep_best: bool = Field(
        True,
        description="Keep the best one too. rl: by held-out accuracy, so that with rl.evaluate_every above 0 "
        "only steps that are evaluated and saved can be it; by mean score where it is 0. value: by value "
        "loss on the held-out rollouts, likewise only steps of value.held_out_every. sft, reward: by the "
        "step's loss.",
    )


class LoggingSection(Section):
    """Where metrics go. metrics.jsonl is written always."""

    tensorboard: bool = Field(True, description="Write TensorBoard event files.")
    wandb: bool = Field(False, description="Log to Weights & Biases (extra: wandb).")
    wandb_project: str = Field("vcppo_jax", description="Weights & Biases project.")
    peak_tflops: float | None = Field(
        None,
        gt=0,
        description="Peak of one device in 10^12 operations a second, for perf/mfu; null looks it up for "
        "TPUs and common NVIDIA GPUs, and leaves perf/mfu out for other devices.",
    )
    samples_per_step: NonNegative = Field(2, description="Responses per step that go to samples.jsonl.")


class VerifierSection(Section):
    """The rule-based verifier."""

    timeout_s: float = Field(5.0, gt=0, description="Seconds after which one comparison counts as timeout.")
    workers: Positive = Field(2, description="Processes that compare answers.")


class Config(Section):
    """A whole run."""

    run_dir: str = Field(description="Directory that the run writes to and resumes from.")
    seed: int = Field(0, ge=0, lt=2**32, description="Seed of initial weights, data order and sampling.")
    phases: tuple[Phase, ...] = Field(
        ("sft", "value", "rl", "evaluate"), description="Phases of `vcppo run`, in this order."
    )
    model: ModelSection
    value_model: ValueModelSection = ValueModelSection()
    mesh: MeshSection = MeshSection()
    data: DataSection
    rollout: RolloutSection = RolloutSection()
    reward: RewardSection = RewardSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    actor: ActorSection = ActorSection()
    critic: CriticSection = CriticSection()
    sft: SFTSection = SFTSection()
    reward_model: RewardModelSection = RewardModelSection()
    value: ValueSection = ValueSection()
    rl: RLSection = RLSection()
    train: TrainSection = TrainSection()
    evaluate: EvaluateSection = EvaluateSection()
    grade: GradeSection = GradeSection()
    verifier: VerifierSection = VerifierSection()
    checkpoint: CheckpointSection = CheckpointSection()
    logging: LoggingSection = LoggingSection()

    @model_validator(mode="after")
    def _combinations(self) -> Config:
        """Refuse combinations that make no sense, each with the key to change."""
        if not self.phases or list(self.phases) != sorted(set(self.phases), key=PHASES.index):
            raise ValueError(f"phases: expected some of {', '.join(PHASES)}, once each and in this order")
        for check in CHECKS:
            check(self)
        return self
