"""One person's device: matches conversions to impressions, and pays for the answer out of their privacy budget.

- `device`: what happens at each call, on one page: `Device.measure_conversion`
- `impression`: what a site saved about an ad it showed
- `conversion`: what a querier asks of a device, checked before anything runs
- `epoch`: the weeks in which a device keeps its filters
- `privacy_loss`: what one epoch pays for one report
- `privacy_filter`: what each epoch has paid, never overdrawn
- `attribution`: how a conversion's value is divided among impressions
- `side_query`: the flag that says a report may be missing something
- `report`: from a histogram to what leaves the device
- `limits`: what no site can change
- `coins`: the coins a device tosses
- `site`: registrable domains
- `storage`: what a device keeps, as the engine sees it
- `memory_store`: in memory, for simulation and tests
- `sqlite_store`: in one SQLite file, for a person
- `schema`: how that file is made, and known to be a good one
- `instance`: how it is known not to be an older copy
- `tick`: reports leave at fixed times
- `agent`: a device on a real machine
- `overview`: everything a person may know about their own device
- `shortfall`: what to tell a person whose report nothing could pay for
- `http_headers`: impressions and conversions by response header
- `structured_fields`: the syntax of those headers
- `errors`: the standard's exceptions
- `dashboard`: a page that shows a person what measurement has cost them
- `actions`: what `trefoil device` does
- `commands`: `trefoil device`
"""
