"""Where planning stands: ids, and the text in effect. Pure: a step gives the next position.

The planner owns ids and cache bits, a transition the embeddings on their way; here they meet.
"""

from dataclasses import dataclass

from scope_contracts.envelope import PPEnvelope
from scope_contracts.errors import OrderError
from scope_rt.control.inbox import Conditioning, Directive
from scope_rt.control.planner import Planner
from scope_rt.control.transition import Transition
from scope_rt.models.recipe_choices import RecomputeText


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A stream between two plans. `text` holds an interpolant while a `transition` is under way."""

    planner: Planner
    text: Conditioning | None = None
    transition: Transition | None = None

    def rebuilds_next(self, directive: Directive) -> bool:
        """Whether the next chunk needs the context of all chunks before it."""
        return self.planner.recomputes(
            hard_cut=directive.hard_cut,
            asked=directive.recompute,
            new_text=directive.conditioning is not None or self.transition is not None,
        )

    def lost_text(self, following: "Position") -> Conditioning | None:
        """The text under which the next recompute runs, where it is not that of `following` and
        ranks that were started again hold it no more."""
        planner = self.planner
        is_before = planner.settings.recipe.recompute_text is RecomputeText.PREVIOUS
        is_lost = is_before and not planner.holds_cache and self.text is not following.text
        return self.text if is_lost else None

    def next(
        self, directive: Directive, *, noise_scale: float | None = None
    ) -> "tuple[PPEnvelope, Position]":
        """The envelope of the next chunk, without tensors, and the position after it; with a
        `noise_scale` it begins with pictures.

        Raises:
            OrderError: there never was a prompt.
        """
        text, transition = self._text_from(directive)
        if text is None:
            raise OrderError("the first chunk needs a prompt; post one first")
        new_text, bias = directive.conditioning is not None, None
        planner = self.planner.steered(seed=directive.seed, bias=directive.bias)
        if transition is not None:
            settings = planner.settings
            step = transition.next(
                resting_bias=settings.kv_cache_attention_bias,
                weights=settings.recipe.transition_weights,
            )
            text = Conditioning(text.prompt, step.embeds)
            new_text, bias, transition = True, step.kv_cache_attention_bias, step.following
        envelope, planner = planner.next(
            hard_cut=directive.hard_cut,
            new_text=new_text or text is not self.text,
            recompute=directive.recompute,
            bias=bias,
            noise_scale=noise_scale,
        )
        return envelope, Position(planner=planner, text=text, transition=transition)

    def _text_from(self, directive: Directive) -> tuple[Conditioning | None, Transition | None]:
        """Text and transition from here on; a hard cut shows the newest prompt at once."""
        text, asked, spec = self.text, directive.conditioning, directive.transition
        if asked is not None:
            if spec is None or text is None or directive.hard_cut:
                return asked, None
            on_the_way = Transition(source=text.embeds, target=asked.embeds, spec=spec)
            return Conditioning(asked.prompt, text.embeds), on_the_way
        if directive.hard_cut and text is not None and self.transition is not None:
            return Conditioning(text.prompt, self.transition.target), None
        return text, self.transition
