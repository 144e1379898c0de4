"""The live demonstration: an ad, a shop, three helpers and one noisy answer, on websites of this machine.

- `live`: start and stop everything; `trefoil live`
- `web`: origins, the frame of a page, the guard, and a tracker to compare with
- `pages`: the start page, two publishers and the shop
- `agent`: the person's device, as websites call it
- `measurement`: the advertiser's side: batches, a crowd, and queries to the helpers
- `measurement_page`: the advertiser's page: an answer as a sentence, a chart and a table
- `helper_views`: what each helper sees of one report
"""
