"""What torch does where Inductor could choose a kernel by timing, which `chosen_by_timing` rests on."""

from __future__ import annotations

from unittest import mock

import pytest
import torch._inductor.config as inductor_config
from torch._inductor.select_algorithm import AlgorithmSelectorCache


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_first_choice_is_taken_where_inductor_is_deterministic(deterministic):
    """Without a look at a clock; else it goes on to time them."""
    choices = [mock.Mock(name=name) for name in ("first", "second")]
    selected = AlgorithmSelectorCache()
    with (
        inductor_config.patch(deterministic=deterministic, max_autotune=True),
        mock.patch.object(selected, "make_precompile_fn", side_effect=InterruptedError),
    ):
        try:
            selected("flex_attention", choices, [], mock.Mock(), input_gen_fns={})
        except InterruptedError:
            assert not deterministic
        else:
            assert deterministic
    assert choices[0].output_node.called == deterministic and not choices[1].output_node.called
