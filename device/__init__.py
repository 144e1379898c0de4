"""One person's device: matches conversions to impressions, and pays for the answer out of their privacy budget.

- `device`: the engine and its interface; read `Device._report` and the methods below it
- `request`: what the engine needs to know of a request, whichever side asks; the side query
- `conversion`: the request of a site on which a conversion happened, checked
- `labelling`: the request of a publisher: did a conversion follow an impression?
- `events`: saved impressions and conversions, and which of them a request may select
- `weeks`: which epochs a request may use, and which events a full epoch evicts
- `epoch`: the calendar of epochs, and the device's coins
- `budget`: what an epoch pays for a report, and the filters that it pays from
- `attribution`: how a conversion's value is divided among impressions
- `report`: from a histogram to what leaves the device
- `schedule`: when a call is worked on and answered, so that its duration reveals nothing
- `limits`: the limits that no site can change
- `option`: numbers, lists and strings as a site passes them, made exact
- `site`: registrable domains
- `services`: the helper sets that a device trusts, by the names that sites choose
- `overview`: what a person may know about their own device
- `agent`: creates and opens a device on a real machine
- `errors`: the standard's exceptions
- `dashboard`: the privacy dashboard, for the person's own browser
- `actions`: what the commands of `trefoil device` share
- `commands`: the commands of `trefoil device`
- `stores`: what a device keeps, and where
- `web`: the device behind web pages: browser checks, response headers, the standard's scenarios
- `browser`: the device behind a person's own browser, as a native messaging host
"""
