"""What a checkpoint was made from, kept beside it so that its answers can be told."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from inkling_mtp_staging.tiny_inkling.election import (
    Election,
    Lexicon,
    VotingLayer,
    hold_election,
)
from inkling_mtp_staging.tiny_inkling.shape import Shape
from inkling_mtp_staging.tiny_inkling.tokenizer import vocabulary

FILE_NAME = "tiny_inkling.json"


@dataclass(frozen=True)
class Recipe:
    """Arguments of one checkpoint. Raises ValueError where they do not fit."""

    shape: Shape
    accept_length: float = 2.5
    draft_steps: int = 3
    seed: int = 0

    @cached_property
    def _layers(self) -> tuple[tuple[VotingLayer, ...], float]:
        return hold_election(
            self.shape.num_layers,
            self.shape.sliding_window,
            self.accept_length,
            self.draft_steps,
        )

    def expected_accept_length(self) -> float:
        """Tokens a step with greedy decoding and ``draft_steps`` drafts."""
        return self._layers[1]

    def election(self) -> Election:
        words = vocabulary(self.shape.vocab_size)[2]
        lexicon = Lexicon.draw(self.shape.vocab_size, words, self.seed)
        return Election(lexicon, self._layers[0])

    def save(self, model_dir: Path) -> None:
        text = json.dumps(asdict(self), indent=2) + "\n"
        (model_dir / FILE_NAME).write_text(text)

    @classmethod
    def load(cls, model_dir: Path) -> Recipe:
        fields = json.loads((model_dir / FILE_NAME).read_text())
        shape = fields.pop("shape")
        shape["mtp_local_layer_ids"] = tuple(shape["mtp_local_layer_ids"])
        return cls(Shape(**shape), **fields)
