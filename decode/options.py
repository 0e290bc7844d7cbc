"""What a person may ask of decoding, as flat named values: the options of `decode` and of `eval`, with their help."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator

from configs.errors import UserError
from configs.reader import read_pairs
from configs.settings import StrictSettings

if TYPE_CHECKING:
    from decode.generation import Settings
    from decode.length import Costs
    from decode.models import Loaded


class DecodeOptions(StrictSettings):
    """Every option leaves the output lossless: it follows the law that these options give plain decoding."""

    profile_only_for_auto: ClassVar[bool] = True

    max_new_tokens: int = Field(128, description="Tokens to generate at most.")
    num_draft_tokens: int | Literal["auto"] = Field(
        3, description="γ: tokens drafted per round, 1 or more; auto: what a latency profile says will pay, 0 included."
    )
    latency_profile: Path | None = Field(
        None,
        description="For auto: profile.json or report.json of this machine. Default: the report.json in the draft's "
        "folder.",
    )
    verifier: Literal["token", "block", "match"] | None = Field(
        None,
        description="token, block or match; they differ in what is accepted when sampling. "
        "Default: block (match with --seed-exact).",
    )
    temperature: float = Field(0.0, description="0 is greedy.")
    top_k: int = Field(0, description="Keep the k likeliest tokens; 0 is off.")
    top_p: float = Field(1.0, description="Keep the likeliest tokens up to this mass; 1 is off.")
    min_p: float = Field(0.0, description="Drop tokens less likely than this share of the likeliest; 0 is off.")
    draft_temperature: float | None = Field(None, description="The draft's temperature. Default: the target's.")
    repetition_penalty: float = Field(1.0, description="Above 1: less of what stands in prompt or answer; 1 is off.")
    presence_penalty: float = Field(0.0, description="Taken off the logits of tokens already generated; 0 is off.")
    frequency_penalty: float = Field(0.0, description="The same for each time a token was generated; 0 is off.")
    no_repeat_ngram_size: int = Field(0, description="No n tokens twice in prompt and answer; 0 is off.")
    bad_word: tuple[str, ...] = Field((), description="A text that must not be generated; may be given several times.")
    logit_bias: dict[int, float] = Field(
        {}, description="ID=BIAS, added to the logit of that token id; may be given several times."
    )
    min_new_tokens: int = Field(0, description="No end token before this many.")
    stop: tuple[str, ...] = Field((), description="A text that ends the answer; may be given several times.")
    quantize_target: Literal["int8", "int4", "nf4"] | None = Field(
        None,
        description="Quantise the target's weights: int8, int4 (torchao) or nf4 (bitsandbytes); the output is then "
        "that target's. Default: as stored.",
    )
    quantize_draft: Literal["int8", "int4", "nf4"] | None = Field(
        None, description="The same for the draft. Default: as stored."
    )
    compile: bool = Field(
        False, description="Compile short forwards (CUDA graphs on a GPU); a warm-up of minutes that long runs repay."
    )
    template_argument: dict[str, Any] = Field(
        {}, description="NAME=VALUE for the chat template, e.g. enable_thinking=false; may be given several times."
    )
    seed: int | None = Field(None, ge=0, description="Seed of the draws. Default: another one in each run.")

    @field_validator("logit_bias", "template_argument", mode="before")
    @classmethod
    def _read_pairs(cls, given: Any) -> Any:
        """`NAME=VALUE` texts, as the command line has them."""
        return read_pairs(given) if isinstance(given, list | tuple) else given

    def quantised(self, target: "Loaded", draft: Any) -> "Loaded":
        """The target as asked for; the draft (contract.Draft, or None) in place. Raises UserError."""
        from decode.quantise import quantise, quantised

        if self.quantize_draft:
            if not list(draft.model.parameters()):
                raise UserError("quantize_draft has no effect on a draft without weights; leave it out")
            quantise(draft.model, self.quantize_draft)
        return quantised(target, self.quantize_target) if self.quantize_target else target

    def compiled(self, model: Any, prompt_tokens: int, longest_draft: int) -> Any:
        """The model as asked for: compiled for texts up to these lengths, or itself."""
        from decode.compiled import Compiled

        context = prompt_tokens + self.max_new_tokens + longest_draft + 1
        return Compiled(model, context, widest=longest_draft + 1) if self.compile else model

    def costs(self, draft: str | None = None) -> "Costs | None":
        """The profile that auto follows, else None. Raises UserError when auto has none."""
        from decode.drafts.kinds import trained_part
        from decode.length import read_costs

        if self.num_draft_tokens != "auto":
            return None
        trained = trained_part(draft) if draft else None
        path = self.latency_profile or (Path(trained) / "report.json" if trained else None)
        if path is None:
            raise UserError("num_draft_tokens auto needs latency_profile, the report.json of an eval on this machine")
        return read_costs(path)

    def settings(self, target: "Loaded | None" = None, costs: "Costs | None" = None) -> "Settings":
        """What the decoder takes; `costs` is the profile for auto. Without a target this only checks the values.

        Raises UserError for a value that makes no sense, or one that would have no effect.
        """
        from decode.generation import Settings
        from decode.laws import Law
        from decode.length import Auto
        from decode.processors import Penalties, word_ids
        from decode.stops import Stops

        gamma = self.num_draft_tokens
        if self.profile_only_for_auto and self.latency_profile is not None and gamma != "auto":
            raise UserError("latency_profile has no effect without num_draft_tokens auto; leave it out")
        law = Law(
            self.temperature, self.top_k, self.top_p, self.min_p, vocabulary=target.vocabulary if target else None
        )
        penalties = Penalties(
            logit_bias=self.logit_bias,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            no_repeat_ngram_size=self.no_repeat_ngram_size,
            bad_words_ids=word_ids(target.tokenizer, self.bad_word) if target else (),
            min_new_tokens=self.min_new_tokens,
            answer_only=bool(target and target.model.config.is_encoder_decoder),
        )
        if target:
            penalties.check_ids(int(target.model.config.vocab_size))
        return Settings(
            law=law,
            max_new_tokens=self.max_new_tokens,
            num_draft_tokens=gamma if gamma != "auto" else Auto(costs) if costs else 1,
            stops=Stops(target.eos_ids if target else (), self.stop),
            seed=self.seed,
            verifier=self.verifier,
            penalties=penalties,
            draft_temperature=self.draft_temperature,
        )
