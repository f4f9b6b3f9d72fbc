"""`--target kubernetes`: an app and an overlay become manifests, and a cluster is made to have them.

- `overlay`: what the author's code does not say, from a TOML file.
- `order`: an app, its image and its overlay, which say all there is to say.
- `pod`: the pod that runs the whole graph, which all kinds share.
- `workload`, `rollout`, `kserve`, `kuberay`: what runs it.
- `scaling`, `traffic`, `policy`: what is around it.
- `manifests`: which of these an order has.
- `api`, `deployment`: a cluster, and an app on it.
"""
