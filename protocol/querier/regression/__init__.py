"""A publisher's logistic regression from one noisy answer (paper, Appendix A).

- `model`: the design matrix, the evidence in an answer, the fit, predictions and their scores
- `features`: encode impressions as vectors of small integers; the publisher's records; an answer checked against both
- `view`: `trefoil regression`: plan, fit, predict
"""
