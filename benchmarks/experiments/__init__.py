"""The paper's evaluation: many devices simulated in columns, three accounting policies, every figure.

- `columns`: the column types
- `world`: impressions, conversions and queries as columns
- `microbenchmark`: workload of Fig. 4 and Fig. 7
- `patcg`: workload of Fig. 5
- `criteo`: workload of Fig. 6
- `files`: the real data sets, for those who have them
- `batches`: which conversion goes into which query
- `matching`: which epochs a conversion asks for
- `privacy_filters`: many filters charged at once
- `policies`: Cookie Monster, ARA-like and IPA-like
- `accuracy`: from an accuracy target to a budget and back
- `simulation`: the three systems over one world
- `bias`: what a querier learns from the side query
- `experiments`: every experiment as a function from options to a result
- `through_mpc`: one point of Fig. 4 with real devices and helpers
- `small_worlds`: devices with a handful of impressions, and what a querier can learn from them, exactly
- `guarantees`: every promise about sites as such a game
- `attack`: what colluding sites can learn or destroy
- `bad_helper`: what one bad helper can learn or destroy
- `plan`: what-if for designers
- `results`: results as they are printed and written
- `references`: recorded numbers of the paper
- `figures`: every subfigure, drawn
- `tables`: how tables look
- `common_options`: the options that all figures share
- `commands`: `trefoil experiment` and `trefoil plan`
"""
