"""The querier: asks three helpers, keeps what she asked, and says what an answer is worth.

In reading order:

- `saved_query`: a query made from a batch, and kept beside it with the key that opens the answer
- `query_folder`: every query of a batch; resuming the newest, finding the others
- `ask`: *Submit · Follow · Collect*, the whole of a query, and what she believes
- `blocking`: the same without `await`, for scripts and notebooks
- `connections`: HTTPS to each helper, pinned, bounded, never redirected
- `refusal`: what a person reads when there is no answer
- `query_failed`: the error that names the stage and the helpers
- `worth`: noise, interval and bias of an answer
- `bias`: what a side query says about missing data (paper, Appendix F)
- `report_span`: what a batch's reports could cost a device, from headers
- `own_record`: which answers are unbiased for certain, from her own record (Appendix F, no budget)
- `record_view`: `trefoil bias` on a terminal
- `verdict`: accept, reject, or what would be needed
- `left_out_list`: which reports are not in the answer, and why
- `view`: `trefoil query` on a terminal
- `every`: how long a period of a series is
- `series`: one query for each day or week of what a collector has
- `series_view`: `trefoil query --every`, a table and intervals over time
- `listing`: `trefoil query --list`, what was asked and which answers are held
- `plot`: the answer as an image
- `command`: `trefoil query`
"""
