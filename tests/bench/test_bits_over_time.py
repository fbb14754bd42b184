"""What policies spend, and that spending evenly is what the method does by itself."""

from functools import partial

import pytest

from gradwire_bench.adaptive import POLICIES, WINDOW, Budget, Spending
from gradwire_bench.trial import Trial, run


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("cosines", [(0.9, 0.1), (0.1, 0.9), (1.0, 0.5), (-0.2, 0.3)])
def test_all_bits_are_spent_and_no_more(policy, cosines):
    steps = 20 * WINDOW + 7
    budget, spent = Budget(0.1, steps, POLICIES[policy]), 0.0
    for start in range(0, steps, WINDOW):
        bits = budget.window()
        assert bits > 0
        spent += bits * min(WINDOW, steps - start)
        budget.saw(cosines[start // WINDOW % 2])
    assert spent <= 0.1 * steps * (1 + 1e-6)
    assert spent == pytest.approx(0.1 * steps, rel=0.06)  # what the last window leaves, at most


def test_more_bits_come_where_the_cosine_falls():
    budget = Budget(0.1, 100 * WINDOW, POLICIES["more where the cosine falls"])
    usual = [budget.window() for _ in range(3) if budget.saw(0.8) is None]
    budget.saw(0.4)
    assert budget.window() > 1.2 * max(usual)


def test_even_spending_is_the_method_itself():
    trial = Trial("language", "sgd", 2, "deadzone:bits=0.2", 1.0, 0)
    steps, policy = WINDOW + 2, POLICIES["the same throughout"]
    plain = run(trial, steps, lambda step: None, samples=64)
    spent = run(trial, steps, lambda step: None, samples=64, averages=partial(Spending, policy=policy))
    assert spent == plain


def test_a_policy_changes_what_is_sent():
    trial = Trial("language", "sgd", 2, "deadzone:bits=0.2", 1.0, 0)
    early = POLICIES["more early: falling from 2 to 0.4 times"]
    steps = 2 * WINDOW
    plain = run(trial, steps, lambda step: None, samples=64)
    spent = run(trial, steps, lambda step: None, samples=64, averages=partial(Spending, policy=early))
    assert spent.sent_bytes == pytest.approx(plain.sent_bytes, rel=0.02)
    assert spent.parameters != plain.parameters
