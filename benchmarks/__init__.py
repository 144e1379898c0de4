"""What the system costs and how well it does: workloads, baselines, the paper's experiments, the demonstrations.

- `seeded`: randomness that can be repeated, for workloads only
- `picture`: one style for every plot
- `result_files`: what is in `results`
- `results_page`: the parts of documents that quote result files
- `cost_tables`: those of a report, lying devices and noise
- `rerun`: every result file again, by the command that it names
- `origin`: where a figure comes from, in every result file
- `workload`: simulated people, and the real devices that it happens on
- `liars`: reports of devices that lie, sealed as honest ones are
- `worker_pool`: processes that leave Ctrl-C to the command that started them
- `bulk_reports`: many sealed reports on all cores
- `reports_command`: `trefoil reports`
- `library`: what `import trefoil` offers; `tutorial.ipynb` is a tour of it
- `demo`: `trefoil demo`: people, reports, three helpers, one answer
- `live`: `trefoil live`: the same in a browser
- `bench`: `trefoil bench`: what things cost on this machine
- `conformance`: `trefoil conformance`: the standard's scenarios
- `experiments`: `trefoil experiment` and `plan`: the paper's evaluation
- `commands`: all of them, for the front door

Results of runs that documents quote are in `results/`.
"""
