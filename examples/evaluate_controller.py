"""Measure a controller from Python: a table with a row for each controller and draw of arrivals."""

from own_controller import HotUsers

import eval
from helm_rl.scenario import load_scenario

scenario = load_scenario("large-steady").model_copy(update={"seconds": 120.0})  # or a name, or a TOML file
table = eval.evaluate(HotUsers, scenario, seeds=2, step=0.1)  # a pyarrow.Table: .to_pandas(), polars.from_arrow(table)
for row in table.to_pylist():
    print(f"{row['title']:20} draw {row['seed']}: P99 {row['p99_ms']:6.1f} ms, within the SLO {100 * row['slo']:.2f} %")
