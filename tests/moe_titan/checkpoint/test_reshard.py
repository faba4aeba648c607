"""A checkpoint of any layout on any other, of models that predict further tokens: element by element, and three more steps."""

from pathlib import Path

import checkpoint_runs
import pytest
import trainer_runs
from trainer_runs import MODELS, layout

LAYOUTS = {
    "tp2 x dp_shard2, ep2": layout(tp=2, dps=2, ep=2),
    # 6 experts over 4 ranks: 2, 2, 2 and none.
    "dp_shard4": layout(dps=4),
    "dp_shard4, ep2": layout(dps=4, ep=2),
    "dp_replicate2 x dp_shard2, ep2": layout(dpr=2, dps=2, ep=2),
    "tp2 x dp_shard2, ep2 x etp2": layout(tp=2, dps=2, ep=2, etp=2),
    "tp4, etp2": layout(tp=4, etp=2),
}


@pytest.mark.parametrize("model", ["qwen3", "deepseek"])
def test_layouts_load_each_other(pool, tmp_path, model) -> None:
    corpus: Path = trainer_runs.write_corpus(tmp_path / "corpus")
    folder, same = tmp_path / "runs", next(iter(LAYOUTS))
    settings = MODELS[model] | {"mtp.num_layers": 1}
    expected, *later = pool.run(4, checkpoint_runs.save_on_every_layout, corpus, folder, settings, LAYOUTS, timeout=300)[0]
    assert any(name.startswith("mtp_layers.0.moe.experts.w1.exp_avg") for name in expected["moments"])
    compared = []
    for world, layouts in ((4, LAYOUTS), (1, {"one rank": {}})):
        goal = (same, expected, *later)
        compared += pool.run(world, checkpoint_runs.load_on_every_layout, corpus, folder, settings, layouts, *goal, timeout=300)[
            0
        ]
    assert len(compared) == len(set(compared)) == len(LAYOUTS) * (len(LAYOUTS) + 1)
