import pytest

from megatron_dppo.errors import UserError
from megatron_dppo.integrations.settings import Pruning


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"budget": 0.0}, "pruning.budget = 0.0"),
        ({"budget": 2}, "pruning.budget = 2"),
        ({"budget": "half"}, "pruning.budget = half"),
        ({"budget": "auto", "rule": "threshold"}, "pruning.budget = auto: .*neyman"),
        ({"rule": "top_k"}, "pruning.rule = top_k: is biased"),
        ({"rule": "best"}, "pruning.rule = best: is no rule"),
        ({"max_weight": 0.5}, "pruning.max_weight = 0.5"),
    ],
)
def test_wrong_field_is_refused(fields, refused):
    with pytest.raises(UserError, match=refused):
        Pruning(**fields)
