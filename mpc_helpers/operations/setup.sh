#!/bin/sh
# Three helpers for compose.yml: keys, a signed set, ledgers, the site shop.example, and tokens for Prometheus.
# What exists is kept, so that a start after a failure goes on where it ended.
set -eu

keys=${TREFOIL_KEYS:-/etc/trefoil}
monitoring=${TREFOIL_MONITORING:-/monitoring}
public=${TREFOIL_PUBLIC:-/public}
north=${TREFOIL_NORTH:-https://north:8443}
south=${TREFOIL_SOUTH:-https://south:8443}
west=${TREFOIL_WEST:-https://west:8443}

make_keys() { # name, address
    [ -e "$keys/$1/entry.json" ] || trefoil keygen helper --name "$1" --address "$2" --dir "$keys/$1"
}

make_keys north "$north"
make_keys south "$south"
make_keys west "$west"

if ! [ -e "$public/helpers.json" ]; then
    draft="$public/draft.json"
    rm -f "$draft"
    trefoil helper-set new "$draft" --entry "$keys/north/entry.json" --entry "$keys/south/entry.json" --entry "$keys/west/entry.json"
    for name in north south west; do
        trefoil helper-set sign "$draft" --key "$keys/$name/identity.key"
    done
    mv "$draft" "$public/helpers.json"
fi
[ -e "$public/shop.key" ] || trefoil keygen site "$public/shop.key" > "$public/shop.txt"
site=$(awk '/^public key/ {print $3}' "$public/shop.txt")

for name in north south west; do
    config="$keys/$name/config.json"
    cp "$public/helpers.json" "$keys/$name/helpers.json"
    [ -e "$keys/$name/metrics.token" ] ||
        (umask 077 && python3 -c 'import secrets; print(secrets.token_hex(32))' > "$keys/$name/metrics.token")
    grep -q metrics_token "$config" || sed -i 's/^{$/{\n  "metrics_token": "metrics.token",/' "$config"
    grep -q shop.example "$config" || trefoil site add shop.example --key "$site" --config "$config"
    [ -e "$keys/$name/ledger.sqlite" ] || trefoil ledger create --config "$config"
    # Prometheus runs as another user: its copies are in a volume of its own.
    cp "$keys/$name/metrics.token" "$monitoring/$name.token"
    cp "$keys/$name/tls.crt" "$monitoring/$name.crt"
    chmod 0644 "$monitoring/$name.token" "$monitoring/$name.crt"
done
