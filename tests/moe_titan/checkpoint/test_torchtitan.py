"""Stock torchtitan 0.2.2 and this project go on with each other's runs, whole trainers on two ranks."""

import shutil

import pytest
import torchtitan_runs
from layout_runs import relative_error
from trainer_runs import MODELS, RUN, layout

# A bias that does not move is all that torchtitan has for Qwen3.
FIXED_BIAS = {"model.overrides.moe_args.load_balance_coeff": 1e-30}


@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("model", ["qwen3", "deepseek"])
def test_either_goes_on_as_the_other(pool, tmp_path, model, ep) -> None:
    settings = RUN | MODELS[model] | layout(dps=2, ep=ep) | (FIXED_BIAS if model == "qwen3" else {})
    runs = {"theirs": torchtitan_runs.train, "ours": torchtitan_runs.train_ours}
    for name, train in runs.items():
        whole = pool.run(2, train, settings, tmp_path / name, group=False)[0]
        assert [step for step, *_ in whole] == [1, 2, 3, 4, 5, 6]
        other = "ours" if name == "theirs" else "theirs"
        resumed = tmp_path / f"{other} from {name}"
        shutil.copytree(tmp_path / name / "checkpoint" / "step-3", resumed / "checkpoint" / "step-3")
        first = [4] if other == "theirs" else []
        after = pool.run(2, runs[other], settings, resumed, *first, group=False)[0]
        assert [step for step, *_ in after] == [4, 5, 6]
        for (_, loss, norm), (_, expected_loss, expected_norm) in zip(after, whole[3:], strict=True):
            assert relative_error(loss, expected_loss) <= 1e-6
            assert relative_error(norm, expected_norm) <= 1e-5
