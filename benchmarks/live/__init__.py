"""The live demonstration: an ad, a shop, three helpers and one noisy answer, on pages of this machine.

- `live`: everything together, until it is stopped
- `places`: where everything is, and which site it stands for
- `home`: the start page
- `drawings`: the pictures of ads and shoes
- `websites`: two that show ads, and the shop
- `agent`: the person's device, as pages reach it
- `idl`: the standard's dictionaries as pages pass them
- `crowd`: simulated people to drown in
- `measurement`: the advertiser's side: batches, and questions to the helpers
- `measurement_page`: the advertiser's page
- `outlook`: what a question would answer, before it is asked
- `verdict`: an answer in one sentence
- `chart`: a histogram with error bars, as picture and table
- `helper_views`: what each helper sees of one report
- `tracker`: what a tracker would have seen
- `web`: what all pages share
- `command`: `trefoil live`
"""
