#!/bin/sh
# Keep the last seven nightly copies of a folder.
set -eu

source=${1:?usage: backup.sh FOLDER}
target=${BACKUP_DIR:-/var/backups}
name=$(basename "$source")-$(date +%F).tar.gz

mkdir -p "$target"
tar -czf "$target/$name" -C "$(dirname "$source")" "$(basename "$source")"
ls -1t "$target" | tail -n +8 | while read -r old; do
    rm -- "$target/$old"
done
echo "wrote $target/$name"
