"""What aggregating under MPC costs over aggregating in the clear, and where the time goes: `trefoil bench throughput`.

- `grid`: what is to be measured, and what that takes
- `target`: the helpers that are measured, here or on other hosts
- `counters`: what each helper has used, by its own metrics page
- `yardstick`: bare opens and a trusted server with every core busy, right before and right after
- `peers`: other programs on the same histograms
- `stages`: where the seconds of a query go, and where its processor time goes
- `point`: what was measured at one size, with the ratios that follow
- `measurement`: all of it, in order
- `view`: tables and sentences for a person
- `spreadsheet`: a line for every run, for programs that read tables
- `plots`: the results, drawn
- `command`: the body of `trefoil bench throughput`
"""
