{{/* The release's name, followed by the alias if an umbrella chart contains this chart under one. */}}
{{- define "dataloaderjob.instance" -}}
{{- if eq .Chart.Name "dataloaderjob" -}}
{{ .Release.Name }}
{{- else -}}
{{- $name := printf "%s-%s" .Release.Name .Chart.Name -}}
{{- if gt (len $name) 63 }}{{ $name = printf "%s-%s" (regexReplaceAll "[^a-z0-9]+$" (trunc 56 $name) "") ($name | sha256sum | trunc 6) }}{{ end -}}
{{ $name }}
{{- end -}}
{{- end }}

{{/*
The instance's name as the first part of object names. A name that a Service cannot have, or of over 40 characters, gets a
digest, so that two releases never share a name.
*/}}
{{- define "dataloaderjob.release" -}}
{{- $instance := include "dataloaderjob.instance" . -}}
{{- $name := regexReplaceAll "[^a-z0-9-]+" $instance "-" -}}
{{- if regexMatch "^[^a-z]" $name -}}
{{- $name = printf "r-%s" $name -}}
{{- end -}}
{{- if or (ne $name $instance) (gt (len $name) 40) -}}
{{- $name = printf "%s-%s" (regexReplaceAll "-+$" (trunc 33 $name) "") ($instance | sha256sum | trunc 6) -}}
{{- end -}}
{{- $name -}}
{{- end }}

{{- define "dataloaderjob.name" -}}
{{- include "dataloaderjob.release" . -}}-operator
{{- end }}

{{/* The names of objects of the whole cluster. No namespace contains a dot, so two releases never share one. */}}
{{- define "dataloaderjob.clusterName" -}}
{{- .Release.Namespace }}.{{ include "dataloaderjob.name" . -}}
{{- end }}

{{- define "dataloaderjob.clusterInjector" -}}
{{- .Release.Namespace }}.{{ include "dataloaderjob.injector" . -}}
{{- end }}

{{- define "dataloaderjob.labels" -}}
app.kubernetes.io/name: dataloaderjob-operator
app.kubernetes.io/instance: {{ include "dataloaderjob.instance" . | quote }}
{{- end }}

{{- define "dataloaderjob.injector" -}}
{{- include "dataloaderjob.release" . -}}-injector
{{- end }}

{{- define "dataloaderjob.injectorLabels" -}}
app.kubernetes.io/name: dataloaderjob-injector
app.kubernetes.io/instance: {{ include "dataloaderjob.instance" . | quote }}
{{- end }}

{{/* The mode of injection: policy, webhook or off. YAML reads an off without quotes as false. */}}
{{- define "dataloaderjob.injection" -}}
{{- $mode := toString .Values.injection.mode -}}
{{- if eq $mode "false" -}}
off
{{- else if ne $mode "auto" -}}
{{ $mode }}
{{- else if .Values.namespaces -}}
off
{{- else if include "dataloaderjob.policyVersion" . -}}
policy
{{- else -}}
webhook
{{- end -}}
{{- end }}

{{/* The API version of MutatingAdmissionPolicies; empty if the API server has none. */}}
{{- define "dataloaderjob.policyVersion" -}}
{{- range list "v1" "v1beta1" -}}
{{- if and (not $.found) ($.Capabilities.APIVersions.Has (printf "admissionregistration.k8s.io/%s/MutatingAdmissionPolicy" .)) -}}
{{- $_ := set $ "found" true -}}
admissionregistration.k8s.io/{{ . }}
{{- end -}}
{{- end -}}
{{- $_ := unset . "found" -}}
{{- end }}

{{/* The user's metadata and the chart's, which wins: (dict "own" (include ...) "more" .Values...) */}}
{{- define "dataloaderjob.with" -}}
{{- merge (.own | fromYaml) (.more | default dict) | toYaml -}}
{{- end }}

{{/* The namespaces whose pods are injected and guarded. */}}
{{- define "dataloaderjob.injectedNamespaces" -}}
matchExpressions:
  - key: kubernetes.io/metadata.name
    operator: NotIn
    values: [{{ .Release.Namespace | quote }}]
  {{- with .Values.namespaces }}
  - key: kubernetes.io/metadata.name
    operator: In
    values: {{- toYaml . | nindent 6 }}
  {{- end }}
{{- end }}

{{/* The labeled pods. */}}
{{- define "dataloaderjob.labeledPods" -}}
matchExpressions:
  - key: dataloading.dev/inject
    operator: Exists
{{- end }}

{{/* An image's name: (dict "image" .Values.image "root" .) */}}
{{- define "dataloaderjob.image" -}}
{{- $repository := .image.repository -}}
{{- if .root.Values.imageRegistry -}}
{{- $repository = printf "%s/%s" (trimSuffix "/" .root.Values.imageRegistry) (regexReplaceAll "^[^/]*[.:][^/]*/" $repository "") -}}
{{- end -}}
{{- if .image.digest -}}
{{ $repository }}@{{ .image.digest }}
{{- else -}}
{{ $repository }}:{{ .image.tag | default .root.Chart.AppVersion }}
{{- end -}}
{{- end }}

{{/*
The operator's rights in the namespaces of jobs, limited to those that it uses: tests compare them with its requests to
the API server. It only creates Secrets, and neither reads nor changes any. It creates Pods only in dry runs, as trials.
*/}}
{{- define "dataloaderjob.rules" -}}
- apiGroups: [dataloading.dev]
  resources: [dataloaderjobs]
  verbs: [list, watch, delete]
- apiGroups: [dataloading.dev]
  resources: [dataloaderjobs/status]
  verbs: [patch]
- apiGroups: [dataloading.dev]
  resources: [dataloaderjobs/scale]
  verbs: [patch]
- apiGroups: [autoscaling]
  resources: [horizontalpodautoscalers]
  verbs: [list]
- apiGroups: [dataloading.dev]
  resources: [dataloaderjobs/finalizers]
  verbs: [update]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, create]
- apiGroups: [""]
  resources: [events]
  verbs: [list, create]
- apiGroups: [""]
  resources: [services, configmaps]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}
