{{/*
The subset of kustomize that packaging/kubernetes uses, so that this chart and the overlays have one source:
`kubernetes` here is that folder. A helper returns nothing; it changes the dictionary that it gets.
*/}}

{{/* Add the resources of a YAML file to .resources, by kind and name. */}}
{{- define "kustomize.read" -}}
{{- $state := . -}}
{{- $text := required (printf "the chart lacks %s" .file) (.files.Get .file) -}}
{{- range regexSplit "(?m)^---\\s*$" $text -1 -}}
{{- $resource := fromYaml . -}}
{{- if $resource.Error }}{{ fail (printf "%s: %s" $state.file $resource.Error) }}{{ end -}}
{{- if $resource -}}
{{- $_ := set $state.resources (printf "%s/%s" $resource.kind $resource.metadata.name) $resource -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Add the resources of .folder, and apply its components and patches, each folder once. */}}
{{- define "kustomize.apply" -}}
{{- $state := . -}}
{{- if not (hasKey .applied .folder) -}}
{{- $_ := set .applied .folder true -}}
{{- $said := fromYaml (required (printf "the chart lacks %s" .folder) (.files.Get (printf "%s/kustomization.yaml" .folder))) -}}
{{- range $said.resources -}}
{{- include "kustomize.read" (dict "file" (printf "%s/%s" $state.folder .) "files" $state.files "resources" $state.resources) -}}
{{- end -}}
{{- range $said.components -}}
{{- include "kustomize.apply" (dict "folder" (clean (printf "%s/%s" $state.folder .)) "files" $state.files "resources" $state.resources "applied" $state.applied) -}}
{{- end -}}
{{- range $said.patches -}}
{{- $resource := required (printf "%s patches what is not there" $state.folder) (get $state.resources (printf "%s/%s" .target.kind .target.name)) -}}
{{- range fromYamlArray .patch -}}
{{- include "kustomize.patch" (dict "resource" $resource "operation" .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* One operation of RFC 6902: "add" to a list or dictionary, "replace" in a dictionary. */}}
{{- define "kustomize.patch" -}}
{{- $steps := splitList "/" (trimPrefix "/" .operation.path) -}}
{{- $last := last $steps -}}
{{- $way := initial $steps -}}
{{- $list := "" -}}
{{- if eq $last "-" }}{{ $list = last $way }}{{ $way = initial $way }}{{ end -}}
{{- $at := .resource -}}
{{- range $way -}}
{{- if kindIs "slice" $at }}{{ $at = index $at (int .) }}{{ else }}{{ $at = index $at (replace "~1" "/" .) }}{{ end -}}
{{- end -}}
{{- if $list -}}
{{- $_ := set $at $list (append (get $at $list) .operation.value) -}}
{{- else if or (eq .operation.op "add") (hasKey $at $last) -}}
{{- $_ := set $at (replace "~1" "/" $last) .operation.value -}}
{{- else -}}
{{- fail (printf "%s cannot be replaced" .operation.path) -}}
{{- end -}}
{{- end -}}
