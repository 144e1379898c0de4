"""The querier, the third role: queries three helpers, saves her queries, and judges the answers. See README.md.

In reading order:

- `saved_query`: a query made from a batch, saved with the key that opens its answer; what its reports could cost
- `ask`: *Submit · Follow · Collect*: the protocol from the querier's side, and what she verifies
- `connections`: HTTPS to each helper, pinned, bounded, without redirects
- `failure`: the error that names the stage and the helpers, and the sentence for a person
- `query_folder`: the saved queries of a batch: resume, find, withdraw; `ask` without `await`
- `result`: noise, confidence interval and bias bound of an answer; the verdict; the plot
- `own_record`: `trefoil bias`: which answers are certainly unbiased, from the querier's own batches (Appendix F)
- `spending`: what answers took of each report, what is left, and an audit of the helpers' arithmetic
- `series`: one query for each day or week of a collector's reports
- `view`: what `trefoil query` shows
- `command`: `trefoil query run`, `list`, `fetch`, `withdraw`, `audit`, `series`
- `regression`: a publisher's logistic regression from one noisy answer (paper, Appendix A)
"""
