"""Chains of modular arithmetic: a task small enough to learn on a CPU, where thinking aloud pays."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass

from areal_core.tasks.base import Problem

CHARACTERS = "0123456789+-*=;,() "  # what prompts and responses are made of, and some to spare
_HELD_OUT_ONE_IN = 16


@dataclass(frozen=True)
class ChainArithmetic:
    """Evaluate a chain of + - * from left to right, modulo `modulus`: "7*3+5=" asks for "6".

    A response may answer at once, or think first: "(*31+56)6" repeats each operator and operand, then the running
    value. Only the text after the last ")" is judged. A sixteenth of all prompts, by checksum, is held out.

    min_terms, max_terms: how many numbers a chain has. modulus: 2 to 10, so that every number is one digit.
    Raises: ValueError for bounds out of order.
    """

    min_terms: int = 3
    max_terms: int = 6
    modulus: int = 10

    def __post_init__(self) -> None:
        if not 2 <= self.min_terms <= self.max_terms:
            raise ValueError(
                f"ChainArithmetic: expected 2 <= min_terms <= max_terms, got {self.min_terms} and {self.max_terms}"
            )
        if not 2 <= self.modulus <= 10:
            raise ValueError(f"ChainArithmetic: expected 2 <= modulus <= 10, got {self.modulus}")

    @property
    def max_prompt_chars(self) -> int:
        """The longest prompt."""
        return 2 * self.max_terms

    @property
    def max_response_chars(self) -> int:
        """The longest response that thinks."""
        return 3 * (self.max_terms - 1) + 3

    def problem(self, index: int, *, seed: int = 0, held_out: bool = False) -> Problem:
        """Problem number `index` of stream `seed`; see `Task.problem`."""
        return self.sample(random.Random(f"chain/{seed}/{index}/{held_out}"), held_out=held_out)

    def sample(self, rng: random.Random, *, held_out: bool = False) -> Problem:
        """A problem drawn with `rng`: the number of terms, the operators and the numbers are uniform."""
        while True:
            problem = self._draw(rng)
            if (zlib.crc32(problem.prompt.encode()) % _HELD_OUT_ONE_IN == 0) == held_out:
                return problem

    def size(self, *, held_out: bool = False) -> int | None:
        """None: problems are made up."""
        return None

    def verify(self, problem: Problem, response_text: str) -> float:
        """1.0 when the text after the last ")" is the answer."""
        return float(response_text.rpartition(")")[2] == problem.answer)

    def extract_answer(self, _problem: Problem, response_text: str) -> str | None:
        """The text after the last ")"; None where there is none."""
        return response_text.rpartition(")")[2] or None

    def demonstration(self, problem: Problem, *, think: bool) -> str:
        """A right response, thinking first or answering at once."""
        return f"({problem.metadata['trace']}){problem.answer}" if think else problem.answer

    def _draw(self, rng: random.Random) -> Problem:
        value = rng.randrange(self.modulus)
        prompt, trace = str(value), ""
        for _ in range(rng.randint(self.min_terms, self.max_terms) - 1):
            operator, operand = rng.choice("+-*"), rng.randrange(self.modulus)
            value = _apply(operator, value, operand) % self.modulus
            prompt += f"{operator}{operand}"
            trace += f"{operator}{operand}{value}"
        prompt += "="
        return Problem(prompt, str(value), f"chain{self.modulus}:{prompt}", {"trace": trace})


def _apply(operator: str, left: int, right: int) -> int:
    if operator == "+":
        return left + right
    return left - right if operator == "-" else left * right
