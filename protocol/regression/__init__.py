"""Learning a model from one noisy answer: a publisher's logistic regression (paper, Appendix A).

- `features`: how one impression becomes a vector of small whole numbers
- `design`: the public half of the regression, and what of an answer can only be noise
- `evidence`: how much of an answer the labels explain, and how much chance would
- `model`: the fitted model, what it predicts and how sure it is
- `fit`: from features and one answer to a model, or to the reason why there is none
- `plan`: how many reports a model takes
- `scores`: how good predictions are
- `drawing`: the same as an image
- `records`: which features went into a batch
- `answer_file`: an answer, checked against its batch
- `view`: what a person is shown
- `commands`: `trefoil regression`
"""
